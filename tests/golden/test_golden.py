"""The golden record generates the same twice, and names what has changed since."""

import copy
import json
from dataclasses import replace

import pytest
from comfyui_specar.api import Output

from .__main__ import GOLDEN, check, record, write
from .cases import cases
from .record import differences, entry

NAMES = (
    "llamagen-t2i / sjd / guided",
    "llamagen-t2i / dynamic, lantern, every other, eagle / guided",
    "mar / next token / guided",
    "mar / block / guided",
)


@pytest.fixture(scope="module")
def drawn() -> dict[str, Output]:
    known = cases()
    return {name: known[name]() for name in NAMES}


def test_what_is_generated_again_is_as_recorded(drawn, tmp_path):
    known = cases()
    write(tmp_path / "golden.json", {name: entry(output) for name, output in drawn.items()})
    assert check(tmp_path / "golden.json", record({name: known[name] for name in NAMES}), whole=True) == []


def changed(output: Output, where: str) -> Output:
    """With one number that is another one."""
    trace = copy.deepcopy(output.trace)
    if where == "tokens":
        tokens = output.tokens.clone()
        tokens.view(-1)[0] += 1
        return replace(output, tokens=tokens)
    if where == "totals":
        trace.totals["draft_passes"] += 1
    elif where == "settings":
        trace.settings["window"] = 5
    else:
        kind, name = where.split()
        values = getattr(trace, f"{kind}s")[name]
        values.view(-1)[-1] += 1
    return replace(output, trace=trace)


@pytest.mark.parametrize("where", ["tokens", "position source", "position p", "round accepted", "totals", "settings"])
def test_a_changed_number_is_found_and_named(drawn, tmp_path, where):
    entries = {name: entry(output) for name, output in drawn.items()}
    write(tmp_path / "golden.json", entries)
    name = NAMES[0]
    [found] = check(tmp_path / "golden.json", entries | {name: entry(changed(drawn[name], where))}, whole=True)
    assert found.startswith(name) and where in found


def test_cases_that_came_or_went_are_named(drawn, tmp_path):
    entries = {name: entry(output) for name, output in drawn.items()}
    write(tmp_path / "golden.json", entries)
    first, *others = NAMES
    found = check(tmp_path / "golden.json", {name: entries[name] for name in others} | {"new": entries[first]}, True)
    assert [name for name in (first, "new") for line in found if line.startswith(name)] == [first, "new"]
    assert not check(tmp_path / "golden.json", {first: entries[first]}, whole=False)


def test_on_another_machine_fractions_are_compared_by_closeness(drawn):
    output = drawn[NAMES[0]]
    rounded, other = copy.deepcopy(output), copy.deepcopy(output)
    rounded.trace.positions["p"] *= 1 + 1e-6  # 100 times below what counts
    other.trace.positions["p"] *= 1 + 1e-3  # 10 times above
    one = entry(output)
    assert differences(one, entry(rounded), same_machine=True)
    assert not differences(one, entry(rounded), same_machine=False)
    assert differences(one, entry(other), same_machine=False)
    assert differences(one, entry(changed(output, "position source")), same_machine=False)


def test_the_record_holds_every_case():
    """After a change of the cases: python -m tests.golden --write."""
    assert json.loads(GOLDEN.read_text(encoding="utf-8"))["cases"].keys() == cases().keys()
