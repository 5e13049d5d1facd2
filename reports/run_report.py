"""Runs in words: the report under a node, and labels that tell several runs apart. Pure Python."""

from __future__ import annotations

from typing import Any

from ..limits.limits import MESSAGE, QUOTED, FileError
from ..limits.printable import printable
from ..samplers.registry import RULES, method_of, structure_class
from ..samplers.trace import Trace

SHOWN_ELSEWHERE = (
    "method",
    "chosen",
    "model",
    "prompt",
    "server",
    "lossless",
    "bounded",
    "unknown_words",
    "notices",
    "pack",
)
FIRST_DRAFTS = {  # SJD.initial -> in words
    "mixed": "left and upper neighbour",
    "left": "left neighbour",
    "upper": "upper neighbour",
    "uniform": "uniform",
    "repeat": "repeat the last token",
    "repeat_upper": "repeat the upper token",
}
SIGMA = {"off": "", "paper": ", Sigma as in the paper", "official": ", Sigma as in the official code"}
NOT_TOLERANT = {"exact": "exact, last step with noise", "printed": "algorithm 1 as printed, biased by its Sigma"}


def drafting(settings: dict[str, Any]) -> str:
    """How a run drafted, the name of its setting everywhere: "next token", "SJD, coupled, window 16", "EAGLE, chain of
    5", "small model, blocks of 8"."""
    method = method_of(settings).in_words(settings)
    if "structure" in settings:
        return f"{method}, {structure_class(settings['structure']).in_words(settings['structure'])}"
    return method


def choice_and_drafting(settings: dict[str, Any]) -> tuple[str, str]:
    """What the user chose on the AR Sampler, if it was made there, and how it drafts; "" where both are the same."""
    chosen, method = settings.get("chosen", ""), drafting(settings)
    return (method, "") if chosen in ("", method) else (chosen, method)


def judgement(settings: dict[str, Any]) -> str:
    """How a run verified its drafts: "exact", "LANTERN++ (neighbours 10, ratio 2)", "approximate within 0.26"; with
    what it left unverified."""
    if settings["method"] == "continuous_next_token":
        return "the model alone" + (", several tokens at once" if settings["iterations"] else "")
    if settings["method"] == "continuous_speculative":
        return _tolerance(settings)
    rule = settings.get("rule", {"rule": "exact"})
    known = {each.name: each for each in RULES}.get(rule["rule"])  # a trace may come from a newer version
    text = known.in_words(rule) if known else rule["rule"]
    if skipping := settings.get("skipping"):
        uniform = skipping["schedule"] == "uniform"
        which = f"one draft in {skipping['interval']}" if uniform else f"drafts alike from {skipping['threshold']:g}"
        return f"VVS: {which} unverified, the others {text}"
    if settings.get("reuse") == "threshold_paper":
        text += " but for reused drafts"  # tested with a distribution that is not theirs
    return text + (f" but for settling below {settings['settle']:g}" if "settle" in settings else "")


def _tolerance(settings: dict[str, Any]) -> str:
    unaligned = "" if settings["aligned"] else ", noise not shared"
    if settings["mode"] in NOT_TOLERANT:
        return NOT_TOLERANT[settings["mode"]] + unaligned
    like = "as the published code" if settings["mode"] == "published" else "approximate"
    within = f"{like} within {settings['tolerance']:g} (kappa {settings['kappa']:.0f})"
    return within + SIGMA[settings["path"]] + unaligned


def exact(trace: Trace) -> bool:
    """Does a run follow the model's own distribution."""
    return trace.settings.get("lossless", True)


def fidelity(trace: Trace) -> str:
    """The same in words, and the bound on its drift."""
    if trace.settings.get("mode") == "exact":
        return "the distribution of the model with noise in its last step"
    if exact(trace):
        return "the model's own distribution"
    if trace.continuous and not trace.totals["draft_passes"]:
        return "tokens of a pass do not see each other"
    if trace.continuous:
        apart = trace.summary()["mean_square_distance"]
        return f"the two models' samples are {apart:.3g} apart (mean squared distance)"
    if trace.drift_bound is None:
        return "approximate, by an unknown drift"
    return f"approximate, drift bound {trace.drift_bound:.2f}, summed over an image"


def describe(trace: Trace) -> str:
    """The report in a few lines, for the node."""
    report = trace.report()
    settings, totals = report["settings"], report["totals"]
    passes = totals["passes_per_image"]
    method = ": ".join(filter(None, choice_and_drafting(settings)))
    if "initial" in settings:
        method += f", first drafts: {FIRST_DRAFTS.get(settings['initial'], settings['initial'])}"
    images, length = totals["images"], trace.positions["source"].shape[1]
    sampled = totals["tokens"] // images
    count = f"{', '.join(map(str, passes))} passes"
    if totals["target_passes"] > max(passes):  # a round that one image skips is a pass of another
        count += f" ({totals['target_passes']} of the batch)"
    count += f" for {sampled} tokens"
    count += "" if sampled == length else f" of {length} (the others were kept or fixed)"
    count += f": {totals['accepted_length']:.2f} tokens per pass"
    judged = f"acceptance: {judgement(settings)}; {fidelity(trace)}"
    lines = [printable(method, MESSAGE), printable(judged, MESSAGE), count]
    if totals["draft_passes"]:
        lines.append(f"{totals['draft_passes']} passes of the drafter")
    if totals["acceptance_rate"] or totals["draft_passes"]:
        rate = f"{totals['acceptance_rate']:.0%} of the positions tested"
        lines.append(f"accepted drafts: {totals['accepted_drafts']} ({rate})")
    if totals.get("mean_width", 0) > 1:
        lines.append(f"draft trees on average: {totals['mean_depth']:.1f} levels, {totals['mean_width']:.1f} wide")
    if expected := totals.get("expected_length"):
        drafts = f"{totals['mean_nodes']:.1f} drafts a tree, the most tokens per second expected here"
        lines.append(f"{drafts}: {expected:.2f} per pass ({totals['accepted_length']:.2f} in fact)")
    if distance := totals.get("draft_tv"):
        lines.append(f"drafter and model are {distance:.2f} apart (mean total variation)")
    if skipped := totals["sources"].get("skipped"):
        lines.append(f"accepted unverified: {skipped}")
    if failed := totals.get("failed_resamples"):
        lines.append(f"resampling failed: {failed} (the last try was taken)")
    lines.append(drawing(settings))
    lines.append(f"seed {totals['seed']}, {totals['seconds']:.2f} s of sampling")
    lines += [printable(notice, MESSAGE) for notice in trace.notices]
    return "\n".join(lines)


def check_words(trace: Trace, name: str) -> None:
    """Raise FileError for a trace from the file ``name`` whose settings are not such as a run of this pack has."""
    try:
        describe(trace)
        labels([trace])
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise FileError(
            f"{name} has a run with settings that this pack does not know ({type(error).__name__}: {error}). Save "
            "it again with Save Trace."
        ) from error


def drawing(settings: dict[str, Any]) -> str:
    """The sampling parameters of the model."""
    if "kind" not in settings:
        words = ", ".join(f"{name} {settings[name]:g}" for name in ("cfg", "temperature", "top_k", "top_p"))
        by_entropy = settings.get("entropy")  # not in traces of older versions
        return words + (", entropy temperature {:g}, {:g}, {:g}".format(*by_entropy) if by_entropy else "")
    cfg = f"cfg {settings['cfg']:g}" + (f" ({settings['cfg_schedule']})" if settings["cfg"] != 1 else "")
    return f"{cfg}, temperature {settings['temperature']:g}, {settings['kind']} with {settings['steps']} steps a token"


def labels(traces: list[Trace]) -> list[tuple[str, str]]:
    """Two short lines per run; runs that would read alike get what differs between them, or else their number."""
    plain = [_label(t.settings) for t in traces]
    extended = [
        (first, f"{second}; {_difference(i, plain, traces)}") if plain.count((first, second)) > 1 else (first, second)
        for i, (first, second) in enumerate(plain)
    ]
    return [
        (first, f"{second}; run {i}") if extended.count((first, second)) > 1 else (first, second)
        for i, (first, second) in enumerate(extended, 1)
    ]


def _label(settings: dict[str, Any]) -> tuple[str, str]:
    first, method = choice_and_drafting(settings)
    return printable(first, QUOTED), printable(", ".join(filter(None, (method, judgement(settings)))), QUOTED)


def _difference(number: int, plain: list[tuple[str, str]], traces: list[Trace]) -> str:
    """The first two settings in which a run differs from those that read like it."""
    alike = [_facts(t) for t, label in zip(traces, plain, strict=True) if label == plain[number]]
    own = _facts(traces[number])
    differing = [name for name in own if len({str(facts.get(name)) for facts in alike}) > 1]
    return ", ".join(printable(f"{name} {own[name]}", QUOTED) for name in differing[:2]) or "alike"


def _facts(trace: Trace) -> dict[str, Any]:
    """Everything that may differ between two runs, under short names."""
    flat: dict[str, Any] = {}
    for name, value in trace.settings.items():
        if name not in SHOWN_ELSEWHERE:
            flat |= value if isinstance(value, dict) else {name: value}
    return flat | {
        "seed": trace.totals["seed"],
        "images": trace.totals["images"],
        "prompt": trace.settings.get("prompt"),
        "model": trace.settings.get("model"),
    }
