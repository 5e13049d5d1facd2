"""Defaults and legal values of every setting: scripts and saved batches rely on them, and messages name them."""

import math
from dataclasses import MISSING, fields

import pytest
from comfyui_specar.batch import cli, dispatch
from comfyui_specar.batch.server import ServerAwayError
from comfyui_specar.samplers import registry
from comfyui_specar.samplers.continuous_contract import ContinuousParams, ContinuousRequest
from comfyui_specar.samplers.contract import Request, SamplingParams
from comfyui_specar.samplers.drafts.adt_tree import ADTTree
from comfyui_specar.samplers.drafts.growing import DRAWS
from comfyui_specar.samplers.drafts.structures import Chain, Dynamic, Static
from comfyui_specar.samplers.drafts.trees import published_paths, shape_of
from comfyui_specar.samplers.methods.continuous import PATHS
from comfyui_specar.samplers.methods.skipping import Skipping
from comfyui_specar.samplers.settings import Setting, check_settings, settings_of

INITIAL = ("mixed", "left", "upper", "uniform", "repeat", "repeat_upper")
REUSE = ("coupled", "gumbel", "threshold_paper", "threshold_exact", "resample", "equality", "none")
FEATURES = ("-1, 0", "-1, 1", "-1, 2", "-1, 3", "0, 0", "1, 1", "2, 2", "3, 3", "-1 or 0", "-1 or 1", "-1 or 5")
ANY = math.inf
# Of numbers: default, least, most, and the value at which settling is exact. Of choices: default, options. Rules are
# pinned by their widgets (tests/nodes/test_schema.py, tests/e2e/object_info.json).
DECLARED = {
    "Chain": {"length": (5, 1, 64, None), "verification": ("token", ("token", "block"))},
    "Static": {},
    "Auto": {"nodes": (64, 1, 1024, None), "depth": (8, 1, 32, None)},
    "Dynamic": {"depth": (5, 1, 32, None), "width": (10, 1, 64, None), "nodes": (58, 1, 1024, None)},
    "ADTTree": {
        "initial": ("horizontal", ("horizontal", "vertical", "random", "tokenflock")),
        "beta": (1.0, 0, 1, None),
        "depth_step": (1, 0, 32, None),
        "width_step": (10, 0, 64, None),
        "radius": (2.0, 1, 64, None),
        "flock_distance": ("euclidean", ("euclidean", "printed")),
    },
    "NextToken": {},
    "Jacobi": {"window": (None, 2, ANY, None), "initial": ("repeat", INITIAL)},
    "SJD": {
        "window": (None, 2, ANY, None),
        "reuse": ("coupled", REUSE),
        "initial": ("mixed", INITIAL),
        "threshold": (0.5, 0, ANY, None),
        "settle": (0.0, 0, 1, 0),
    },
    "DraftTree": {},
    "ContinuousNextToken": {"iterations": (None, 1, ANY, None)},
    "ContinuousSpeculative": {
        "length": (8, 1, ANY, None),
        "prefill": (0.05, 0, 1, None),
        "mode": ("block", ("block", "prefix", "exact", "printed", "published")),
        "condition": (None, ("prefix", "drafts")),
        "path": ("off", ("off", "paper", "official")),
    },
    "Skipping": {
        "schedule": ("uniform", ("uniform", "dynamic")),
        "interval": (4, 2, ANY, None),
        "threshold": (0.7, 0, ANY, None),
        "decay": (0.9, 1e-6, 1, None),
        "path": ("uniform", ("uniform", "confident", "first")),
        "guard": (5, 0, ANY, None),
        "features": ("-1, 0", FEATURES),
    },
    "SamplingParams": {
        "cfg": (1.0, 1, ANY, None),
        "temperature": (1.0, 0, ANY, None),
        "top_k": (0, 0, ANY, None),
        "top_p": (1.0, 0, 1, None),
    },
    "ContinuousParams": {
        "cfg": (1.0, 1, ANY, None),
        "cfg_schedule": ("linear", ("linear", "constant")),
        "temperature": (1.0, 0, ANY, None),
        "iterations": (None, 1, ANY, None),
    },
}
# Defaults of what declares no legal values.
REQUEST = {"negative": None, "seed": 0, "batch": 1, "callback": None, "notices": ()}
PLAIN = {
    "Static": {"tree": "eagle_25"},
    "Auto": {"costs": None},
    "ADTTree": {"depths": (1, 9), "widths": (4, 39), "nodes": 58, "first": (5, 10)}
    | {"bonus": False, "base": (0, 0), "pays": False},
    "Jacobi": {"reuse": "gumbel", "threshold": 0.5, "settle": 0.0},
    "DraftTree": {"name": "draft_tree"},
    "ContinuousSpeculative": {"tolerance": 0.26, "aligned": True},
    "Skipping": {"truncate": True, "refresh": True},
    "SamplingParams": {"order": ("top_k", "top_p"), "entropy": None},
    "ContinuousParams": {"steps": 100, "kind": "ddpm"},
    "Request": REQUEST | {"strength": None, "skippable": None},
    "ContinuousRequest": REQUEST | {"tokens": None, "kept": None},
}
OTHERS = Skipping, SamplingParams, ContinuousParams, Request, ContinuousRequest
OWNERS = {owner.__name__: owner for owner in (*registry.RULES, *registry.STRUCTURES, *registry.METHODS, *OTHERS)}


@pytest.mark.parametrize("name", [name for name in OWNERS if OWNERS[name] not in registry.RULES])
def test_defaults_and_legal_values_stay(name):
    declared, found, plain = settings_of(OWNERS[name]), {}, {}
    for each in fields(OWNERS[name]):
        if each.name in declared:
            legal = declared[each.name]
            numbers = legal.low, legal.high, legal.exact
            found[each.name] = (each.default, *([legal.options] if legal.options else numbers))
        elif each.default is not MISSING:
            plain[each.name] = each.default
    assert found == DECLARED.get(name, {}) and plain == PLAIN.get(name, {})


def test_every_setting_is_part_of_a_report_except_what_a_rule_takes_from_its_method():
    hidden = {(name, each) for name in OWNERS for each, legal in settings_of(OWNERS[name]).items() if not legal.shown}
    assert hidden == {("CoolSD", "steps")}


@pytest.mark.parametrize(
    ("legal", "inside", "outside"),
    [
        (Setting(2, 5), (2, 3.5, 5), (math.nextafter(2, 1), math.nextafter(5, 6), math.nan, -math.inf, math.inf)),
        (Setting(0), (0, 1e300), (math.inf, math.nan, -1e-300)),
        (Setting(), (-1e300, 0, 1e300), (math.inf, -math.inf + math.inf, math.nan)),
        (Setting(0, 1, above=True), (1e-300, 1), (0, -1e-300, math.nan)),
        (Setting(options=("a", "b")), ("a", "b"), ("c", "", None, 1)),
    ],
)
def test_both_ends_are_legal_and_nothing_beyond_them(legal, inside, outside):
    assert all(legal.legal(value) for value in inside)
    for value in outside:
        with pytest.raises(ValueError, match="size is"):
            legal.check("size", value)


def test_what_is_no_number_is_named():
    with pytest.raises(TypeError, match="size is 'x'.*number"):
        Setting(2, 5).check("size", "x")


def beyond(legal):
    """Values that are no longer legal: of the next whole numbers, because these are wrong for any type."""
    if legal.options:
        return ["other"]
    return [value for value in (legal.low - 1, legal.high + 1, math.nan, math.inf) if not legal.legal(value)]


@pytest.mark.parametrize("name", [name for name in OWNERS if settings_of(OWNERS[name])])
def test_a_check_refuses_and_names_what_is_beyond_any_limit(name):
    """The check of the rule, structure or schedule itself; methods are given a request, too, and check the same."""
    owner = OWNERS[name]
    required = {each.name: None for each in fields(owner) if each.init and each.default is MISSING}
    check = check_settings if owner in (*registry.METHODS, SamplingParams) else owner.check
    check(owner(**required))
    for setting, legal in settings_of(owner).items():
        assert beyond(legal)
        for value in beyond(legal):
            with pytest.raises(ValueError, match=rf"^{setting} is {value!r}") as error:
                check(owner(**required | {setting: value}))
            limits = [f"{limit:g}" for limit in (legal.low, legal.high) if limit < math.inf]
            assert all(word in str(error.value) for word in list(map(repr, legal.options)) or limits)


@pytest.mark.parametrize(
    ("tree", "drafts", "inner"),
    [("eagle_25", (4, 8, 8, 3, 2), (4, 4, 1, 1, 0)), ("lantern_57", (5, 13, 16, 14, 9), (5, 7, 7, 5, 0))],
)
def test_the_published_trees_have_their_sizes(tree, drafts, inner):
    shape = shape_of(published_paths(tree))
    assert tuple(len(level.parent) for level in shape) == drafts
    assert tuple(level.inner for level in shape) == inner
    assert Static(tree).size() == (sum(drafts), 5) and sum(drafts) == int(tree[-2:])


@pytest.mark.parametrize(
    ("structure", "size", "passes", "expansions"),
    [
        (Chain(5), (5, 5), 4, 4),
        (Chain(1), (1, 1), 0, 0),
        (Static("eagle_25"), (25, 5), 4, 10),
        (Static(((0,), (1,), (0, 0))), (3, 2), 1, 1),
        (Dynamic(5, 10, 58), (58, 5), 4, 40),
        (Dynamic(1, 4, 3), (3, 1), 0, 0),
    ],
)
def test_what_a_structure_asks_of_the_drafter(structure, size, passes, expansions):
    assert (structure.size(), structure.passes(), structure.expansions()) == (size, passes, expansions)


def test_a_tree_has_fewer_drafts_than_a_round_has_random_numbers():
    Static(tuple((n,) for n in range(DRAWS - 1))).check()
    with pytest.raises(ValueError, match=f"{DRAWS} drafts.*{DRAWS - 1}"):
        Static(tuple((n,) for n in range(DRAWS))).check()


def test_sigma_is_that_of_the_paper_or_upside_down_as_in_the_official_code():
    assert PATHS == {"off": 0, "paper": 1, "official": -1}


def test_how_long_a_batch_waits_stays():
    """As its --help and documents say; without a reason, a server that cannot be reached has not ended."""
    assert (dispatch.GIVE_UP_SECONDS, dispatch.NEVER_ANSWERED_SECONDS, dispatch.MAX_UNEXPECTED) == (300, 10, 2)
    away = ServerAwayError("away")
    assert not away.gone and not away.unexpected


def test_options_of_a_batch_that_are_not_given():
    found = vars(cli.parser().parse_args(["jobs.csv"]))
    assert (str(found.pop("jobs")), found.pop("workflow").name) == ("jobs.csv", cli.WORKFLOW.name)
    unset = ("results", "out", "server", "patience", "ray", "decoder", "drafter")
    wanted = dict.fromkeys(unset) | dict.fromkeys(("maps", "retry_failed", "dry_run"), False)
    wanted |= {"model": "default", "method": "sjd", "dtype": "auto"}
    assert found == wanted | {"retries": 3, "in_flight": 2, "actors": 1, "cpus": 1, "gpus": 0}


@pytest.mark.parametrize(
    ("legal", "illegal"),
    [
        ({"nodes": 1024}, {"nodes": 1025}),
        ({"nodes": 9}, {"nodes": 8}),
        ({"first": (32, 64)}, {"first": (33, 5)}),
        ({"first": (1, 1)}, {"first": (0, 5)}),
        ({"first": (5, 64)}, {"first": (5, 65)}),
        ({"first": (5, 1)}, {"first": (5, 0)}),
        ({"base": (32, 64)}, {"base": (33, 0)}),
        ({"base": (0, 0)}, {"base": (0, -1)}),
        ({"depths": (1, 32)}, {"depths": (1, 33)}),
        ({"depths": (9, 9)}, {"depths": (10, 9)}),
        ({"depths": (1, 1)}, {"depths": (0, 1)}),
        ({"widths": (64, 64)}, {"widths": (4, 65)}),
        ({"widths": (1, 4)}, {"widths": (0, 4)}),
    ],
)
def test_an_adapted_tree_has_both_limits_of_everything(legal, illegal):
    ADTTree(**legal).check()
    with pytest.raises(ValueError, match=next(iter(illegal))):
        ADTTree(**illegal).check()
