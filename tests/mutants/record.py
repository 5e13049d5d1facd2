"""Which tests run which lines."""

from __future__ import annotations

import json
import re
import sys
import threading
import time
from collections import Counter, defaultdict
from functools import lru_cache
from pathlib import Path

import pytest

from .mutations import Mutant

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / ".cache/mutants.json"  # {test: [seconds, {file: a bit for each line, in hexadecimal}]}
OTHERS = tuple(f"{ROOT}/{folder}" for folder in ("tests", ".", "tools"))
SLOWEST = 5  # seconds of the processor; slower tests are left out
CASES = 2  # seconds for the cases of a parametrised test
# What is read by an import, and so by no test's lines.
PINS = ["tests/unit/test_settings.py", "tests/unit/test_rng.py::test_the_numbers_of_purposes_stay"]
FEW = 15  # tests of a mutant that acts there, which costs an import and a collection
MOST = 60  # tests per mutant: some wait more than they compute
BUDGET = 6.0  # seconds of tests per mutant, as recorded


Record = dict[str, tuple[float, dict[str, int]]]


class Recorder:
    """A pytest plugin that notes the lines of the pack which each test runs, and its seconds of the processor."""

    def __init__(self):
        self.lines: dict[str, set[int]] = defaultdict(set)
        self.tests, self.failed, self.spent = {}, set(), Counter()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if self.spent[item.nodeid.split("[")[0]] > CASES:
            pytest.skip("enough cases")

    def trace(self, frame, event, argument):
        file = frame.f_code.co_filename
        if not file.startswith(f"{ROOT}/") or file.startswith(OTHERS) or file.endswith("_triton.py"):
            return None
        seen = self.lines[file[len(str(ROOT)) + 1 :]]

        def line(frame, event, argument):
            seen.add(frame.f_lineno)
            return line

        return line(frame, event, argument)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        self.lines.clear()
        began = time.process_time()
        threading.settrace(self.trace)
        sys.settrace(self.trace)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            threading.settrace(None)
            seconds = time.process_time() - began
            self.spent[item.nodeid.split("[")[0]] += seconds
            if seconds < SLOWEST and item.nodeid not in self.failed:
                lines = {file: f"{sum(1 << n for n in numbers):x}" for file, numbers in self.lines.items()}
                self.tests[item.nodeid] = [round(seconds, 3), lines]

    def pytest_runtest_logreport(self, report):
        if not report.passed:
            self.failed.add(report.nodeid)

    def pytest_sessionfinish(self):
        RECORD.parent.mkdir(exist_ok=True)
        tests = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}
        RECORD.write_text(json.dumps(tests | self.tests), encoding="utf-8")


def read_record() -> Record:
    tests = json.loads(RECORD.read_text(encoding="utf-8"))
    return {name: (took, {f: int(bits, 16) for f, bits in lines.items()}) for name, (took, lines) in tests.items()}


def acts_at_import(mutant: Mutant, record: Record) -> bool:
    """Whether an import runs the mutant's line, and no test: as in a decorator's function."""
    return mutant.at_import or not any(lines.get(mutant.file, 0) >> mutant.line & 1 for _, lines in record.values())


def tests_of(mutant: Mutant, record: Record, thorough: int = 1) -> list[str]:
    """The tests that run the mutant's line, or its function, or what names it: one case of every test first, the quick
    ones before the slow ones, for BUDGET seconds. thorough: for so many times as long."""
    function = {mutant.file: sum(1 << n for n in mutant.lines)}
    wanted = [_mentions(mutant.name), function] if mutant.at_import else [{mutant.file: 1 << mutant.line}, function]
    for bits in [*wanted, {mutant.file: -1}]:
        found = [t for t, (_, lines) in record.items() if any(lines.get(f, 0) & n for f, n in bits.items())]
        if found:
            break
    cases, keyed, seconds = Counter(), [], 0.0
    for test in sorted(found, key=lambda test: record[test][0]):
        cases[test.split("[")[0]] += 1
        keyed.append((cases[test.split("[")[0]], len(keyed), test))
    chosen = []
    for *_, test in sorted(keyed):
        seconds += record[test][0]
        if chosen and (seconds > thorough * BUDGET or len(chosen) == thorough * MOST):
            break
        chosen.append(test)
    return [*PINS, *chosen[: thorough * FEW]] if acts_at_import(mutant, record) else chosen


@lru_cache
def _mentions(name: str) -> dict[str, int]:
    """The lines of the pack with a name, as bits."""
    word, found = re.compile(rf"\b{re.escape(name)}\b"), {}
    for path in ROOT.rglob("*.py"):
        if name and not str(path).startswith(OTHERS):
            lines = path.read_text(encoding="utf-8").splitlines()
            found[str(path.relative_to(ROOT))] = sum(1 << n for n, line in enumerate(lines, 1) if word.search(line))
    return found
