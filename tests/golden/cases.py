"""What the golden record generates: every method x rule x structure x schedule, and some of them under every setting.

Cases are named "model / method / what is asked", and nothing is loaded until one is generated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
from comfyui_specar import api
from comfyui_specar.samplers import registry
from comfyui_specar.samplers.drafts.adt_tree import INITIAL
from comfyui_specar.samplers.drafts.guesses import INITIAL as GUESSES
from comfyui_specar.samplers.methods.continuous import MODES
from comfyui_specar.samplers.methods.jacobi import COMPARED, REUSE
from comfyui_specar.samplers.methods.skipping import FEATURES, PATHS
from comfyui_specar.samplers.methods.vvs import VVS
from comfyui_specar.samplers.rules.cool_sd import SCHEDULES
from comfyui_specar.samplers.rules.lantern import RESIDUALS

from .subjects import BUNDLED, BUNDLED_VECTORS, SEED, TINY, TINY_VECTORS, Subject, continuous, discrete

Make = Callable[[Subject], Any]  # a method for a model
Ask = Callable[[Subject], dict[str, Any]]  # options of api.sample for a model

TREE = ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0))
ADT = {"depths": (1, 3), "widths": (1, 4), "width_step": 1, "first": (2, 3), "nodes": 8}
s, r = api.structures, api.rules
STRUCTURES = {
    "chain": s.Chain(3),
    "static": s.Static(TREE),
    "dynamic": s.Dynamic(3, 3, 8),
    **{f"adt {initial}": s.ADTTree(initial, **ADT) for initial in INITIAL},
}
STRUCTURE_VARIANTS = {
    "blocks": s.Chain(3, "block"),
    "adt printed": s.ADTTree(flock_distance="printed", **ADT),
    "adt bonus": s.ADTTree(bonus=True, **ADT),
    "adt base": s.ADTTree(base=(2, 3), **ADT),
}
RULES = {
    "exact": r.Exact(),
    "lantern": r.Lantern(5, 0.3),
    "lantern++": r.LanternPP(5, 3.0),
    "rsd": r.UniformRSD(2.0),
    "cool-sd": r.CoolSD(2.0),
    "grouped": r.Grouped(radius=100.0),
    "metered": r.TVMetered(0.3),
    "entropy": r.Entropy(),
}
RULES |= {rule.name: rule() for rule in registry.RULES if rule not in {type(rule) for rule in RULES.values()}}
RULE_VARIANTS = {
    **{f"lantern {redraw}": r.Lantern(5, 0.3, redraw) for redraw in RESIDUALS[1:]},
    **{f"lantern++ {redraw}": r.LanternPP(5, 3.0, redraw) for redraw in RESIDUALS[1:]},
    **{f"cool-sd {schedule}": r.CoolSD(2.0, schedule=schedule) for schedule in SCHEDULES[1:]},
    "cool-sd no floor": r.CoolSD(2.0, floor=False),
    "grouped tight": r.Grouped(window=4, gap=0.05, radius=2.0),
}
SKIPS = {
    "verified": None,
    "every other": api.methods.Skipping(interval=2, guard=1),
    "alike": api.methods.Skipping("dynamic", threshold=0.0, guard=1),
}
SKIP_VARIANTS = {
    **{f"every other {path}": api.methods.Skipping(interval=2, path=path, guard=1) for path in PATHS[1:]},
    "every other whole": api.methods.Skipping(interval=2, truncate=False, guard=1),
    "every other stale": api.methods.Skipping(interval=2, refresh=False, guard=1),
    **{
        f"every other, features {name}": api.methods.Skipping(interval=2, guard=1, features=name)
        for name in list(FEATURES)[1:]
    },
}


def tree(structure: str, rule: str = "exact", skips: str = "verified", drafter: str = "eagle") -> tuple[str, Make]:
    """A named DraftTree."""

    def make(subject: Subject) -> Any:
        parts = subject.drafters[drafter], (STRUCTURES | STRUCTURE_VARIANTS)[structure], (RULES | RULE_VARIANTS)[rule]
        skipping = (SKIPS | SKIP_VARIANTS)[skips]
        if skipping is None:
            return api.methods.DraftTree(*parts)
        return VVS(*parts, skipping=skipping, name="draft_tree")

    return f"{structure}, {rule}, {skips}, {drafter}", make


def plain(name: str, method: Any) -> tuple[str, Make]:
    """A method without a drafter."""
    return name, lambda subject: method


def preset(name: str, *structure: Any, **settings: Any) -> tuple[str, Make]:
    """A published method by its name in the headless interface."""
    return name, lambda subject: getattr(api.methods, name)(subject.drafters["eagle"], *structure, **settings)


WINDOWS = dict(
    [
        plain("next token", api.methods.NextToken()),
        plain("jacobi", api.methods.Jacobi(6)),
        *(
            plain(f"sjd {reuse}, {initial}", api.methods.SJD(6, reuse, initial))
            for reuse, initial in product(REUSE, GUESSES)
        ),
        *(
            plain(f"sjd {reuse}, {name}", api.methods.SJD(6, reuse, rule=rule))
            for reuse in REUSE
            if reuse not in COMPARED
            for name, rule in RULES.items()
            if name != "exact"
        ),
        plain("sjd settle 0.1", api.methods.SJD(6, settle=0.1)),
    ]
)
PRESETS = dict(
    [
        preset("Lantern", STRUCTURES["dynamic"], neighbours=5),
        preset("LanternPP", STRUCTURES["static"], neighbours=5),
        preset("CoolSD", STRUCTURES["static"]),
        preset("ADTTree", **ADT),
        preset("VVS", STRUCTURES["dynamic"], RULES["lantern"], interval=2),
    ]
)
ONES = dict(
    [  # one of every kind
        plain("next token", api.methods.NextToken()),
        plain("sjd", api.methods.SJD(6)),
        plain("sjd gumbel", api.methods.SJD(6, "gumbel")),
        plain("sjd lantern", api.methods.SJD(6, rule=RULES["lantern"])),
        tree("blocks", drafter="small"),
        tree("static", "cool-sd"),
        tree("dynamic", "lantern", "every other"),
        tree("adt horizontal", "metered", drafter="small"),
    ]
)
PRODUCT = dict(tree(*names) for names in product(STRUCTURES, RULES, SKIPS))
VARIANTS = dict(
    [
        *(tree(name) for name in STRUCTURE_VARIANTS),
        *(tree("static", name) for name in RULE_VARIANTS),
        *(tree("dynamic", skips=name) for name in SKIP_VARIANTS),
        *(tree(name, drafter="small") for name in STRUCTURES),
    ]
)


def kept(images: int, batch: int) -> Ask:
    """With tokens kept that are other ones in each of ``images``: a beginning, and some in between."""

    def ask(subject: Subject) -> dict[str, Any]:
        layout = subject.layout
        shape = images, layout.rows, layout.cols
        ids = torch.arange(images * layout.rows * layout.cols).view(shape) % subject.model.vocab
        keep = ids % 5 == 3
        keep[0, 0, : layout.cols // 2] = True
        return {"layout": layout.keeping(ids, keep), "batch_size": batch}

    return ask


def over_rows(name: str, make: Callable[[torch.Tensor], torch.Tensor]) -> Ask:
    """With a map that depends on the row: ``make`` is given the rows' shares of the image [rows, 1]."""

    def ask(subject: Subject) -> dict[str, Any]:
        layout = subject.layout
        shares = torch.linspace(0, 1, layout.rows)[:, None].expand(-1, layout.cols)
        return {name: make(shares)}

    return ask


ASKED: dict[str, Ask] = {
    "guided": lambda subject: {},
    "unguided": lambda subject: {"cfg": 1.0},
    "negative": lambda subject: {"negative": subject.negative},
    "greedy": lambda subject: {"temperature": 0.0},
    "hot": lambda subject: {"temperature": 1.4, "top_p": 1.0},
    "top-k": lambda subject: {"top_k": 5, "top_p": 1.0},
    "top-k and top-p": lambda subject: {"top_k": 9, "top_p": 0.7},
    "three": lambda subject: {"batch_size": 3},
    "kept": kept(1, 1),
    "kept, two": kept(2, 2),
    "strength": over_rows("strength", lambda shares: shares),
    "skippable": over_rows("skippable", lambda shares: shares >= 0.5),
    "whole": lambda subject: {"layout": subject.model.layout()},
}
# Questions for methods with certain parts only, one of them in the method's name:
PARTS = {"strength": RULES.keys() - {"exact"}, "skippable": SKIPS.keys() - {"verified"}}


def vectors(**settings: Any) -> Make:
    """Speculative decoding of vectors."""
    return lambda subject: api.methods.ContinuousSpeculative(*subject.drafters.values(), length=3, **settings)


VECTOR_METHODS: dict[str, Make] = {
    "next token": lambda subject: api.methods.ContinuousNextToken(),
    **{mode: vectors(mode=mode) for mode in MODES},
    "block, drafts": vectors(condition="drafts"),
    "block, tight": vectors(tolerance=0.02),
    "block, any": vectors(tolerance=float("inf")),
    "block, unaligned": vectors(aligned=False),
    "block, prefill": vectors(prefill=0.5),
    "block, official": vectors(path="official"),
    "prefix, paper": vectors(mode="prefix", path="paper"),
    "exact, unaligned": vectors(mode="exact", aligned=False),
}
# Of xAR, whose cells have more than one token:
OF_CELLS = ("next token", "published", *(name for name in VECTOR_METHODS if name.startswith("block")))


def kept_vectors(subject: Subject) -> dict[str, Any]:
    rows, cols = subject.model.grid
    tokens = torch.linspace(-1, 1, rows * cols * subject.model.channels).view(1, rows, cols, -1)
    return {"tokens": tokens, "kept": (torch.arange(rows * cols) % 3 == 0).view(1, rows, cols)}


VECTORS_ASKED: dict[str, Ask] = {
    "guided": lambda subject: {},
    "unguided": lambda subject: {"cfg": 1.0},
    "negative": lambda subject: {"negative": subject.negative},
    "cool": lambda subject: {"temperature": 0.5},
    "constant": lambda subject: {"cfg_schedule": "constant"},
    "more steps": lambda subject: {"steps": 9},
    "three": lambda subject: {"batch_size": 3},
    "kept": kept_vectors,
    "whole": lambda subject: {"tokens": None, "kept": None},
}
ONE_AT_A_TIME: dict[str, Ask] = {
    "ddim": lambda subject: {"kind": "ddim"},
    "iterations": lambda subject: {"iterations": 4},
}


def listed() -> Iterator[tuple[str, str, Make, str, Ask, Callable[[str], Subject]]]:
    """Model, method and question of every case."""
    once = {"guided": ASKED["guided"]}
    for model, methods, asked in (
        *((name, WINDOWS | PRESETS | PRODUCT | VARIANTS, once) for name in ("lumina-mgpt", "janus-pro")),
        *((name, ONES, once) for name in TINY),
        ("lumina-mgpt", ONES, ASKED),
        (BUNDLED, ONES, ASKED),
        (BUNDLED, WINDOWS | PRESETS | VARIANTS, once),
    ):
        for (method, make), (question, ask) in product(methods.items(), asked.items()):
            if any(part in method for part in PARTS.get(question, ("",))):
                yield model, method, make, question, ask, discrete
    once = {"guided": VECTORS_ASKED["guided"]}
    for model in (BUNDLED_VECTORS, *TINY_VECTORS):
        methods = {name: VECTOR_METHODS[name] for name in OF_CELLS} if model == "xar" else VECTOR_METHODS
        for (method, make), (question, ask) in product(methods.items(), once.items()):
            yield model, method, make, question, ask, continuous
    for model, method in product((BUNDLED_VECTORS, "mar"), ("next token", *MODES)):
        for question, ask in VECTORS_ASKED.items():
            yield model, method, VECTOR_METHODS[method], question, ask, continuous
        if method not in ("exact", "printed"):  # these need the noise of the last step, which ddim has not
            for question, ask in ONE_AT_A_TIME.items():
                yield model, method, VECTOR_METHODS[method], question, ask, continuous


def cases() -> dict[str, Callable[[], api.Output]]:
    """All of them by name."""
    return {
        f"{model} / {method} / {question}": partial(_draw, subject, model, make, ask)
        for model, method, make, question, ask, subject in listed()
    }


def _draw(load: Callable[[str], Subject], name: str, make: Make, ask: Ask) -> api.Output:
    subject = load(name)
    layout = {} if subject.layout is None else {"layout": subject.layout}
    options = subject.options | layout | ask(subject)
    return api.sample(subject.model, subject.prompt, make(subject), seed=SEED, **options)
