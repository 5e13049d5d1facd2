"""Do the tests notice when the code is changed?

    python -m tests.mutants --record tests/unit            note which lines each test runs, and how long it takes
    python -m tests.mutants samplers kernels/logits.py --count 200 --seed 1 --minutes 30 --tests tests/unit

Changes the code in --count places chosen by --seed (a comparison, a sign, a number, a condition, a call left out), one
at a time and in memory only, and runs the tests that run the changed line, the quick ones first, until one fails.
Prints every mutant that no test noticed, and the share that was noticed. Those that change nothing that matters are
listed in equivalent.txt, with the reason; they do not count.

Each mutant is tried in a fork of a process that has imported and collected everything, so this needs POSIX (and Python
3.11). The record is one run of the tests; it must be repeated when lines have moved.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch  # noqa: F401 imported once, for all forks
from hypothesis.internal.conjecture.engine import ConjectureRunner

from .mutations import Mutant, mutants
from .record import ROOT, Recorder, acts_at_import, read_record, tests_of
from .trials import Trials, import_changed

EQUIVALENT = Path(__file__).parent / "equivalent.txt"
HANGS = 90  # seconds, many times BUDGET for a busy machine
QUIET = ["-q", "-x", "-p", "no:cacheprovider", "-o", f"timeout={HANGS}"]


def in_fork(run: Callable[[], int], thorough: int = 1) -> int | None:
    """The exit status of ``run`` in a child process, whose output is thrown away; None if it hangs."""
    if not (child := os.fork()):
        os.setpgid(0, 0)
        for stream in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        try:
            os._exit(int(run()))
        finally:
            os._exit(1)
    ends = time.monotonic() + HANGS * thorough
    while time.monotonic() < ends:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants")
    parser.add_argument("paths", nargs="*", help="files and folders to change, relative to the repository")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--tests", nargs="+", default=["tests/unit"])
    parser.add_argument("--thorough", type=int, default=1, metavar="N", help="run N times as many tests on each")
    parser.add_argument("--again", type=Path, metavar="OUTPUT", help="only those that survived in this earlier output")
    parser.add_argument("--record", nargs=argparse.REMAINDER, metavar="TESTS")
    options = parser.parse_args()
    os.chdir(ROOT)
    if options.record:
        sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", *options.record], plugins=[Recorder()]))

    files = [str(f) for path in map(Path, options.paths) for f in (path.rglob("*.py") if path.is_dir() else [path])]
    wanted = mutants(ROOT, [file for file in files if not file.endswith("_triton.py")], options.count, options.seed)
    equivalent = {line.rsplit("  # ", 1)[0] for line in EQUIVALENT.read_text(encoding="utf-8").splitlines()}
    wanted = [mutant for mutant in wanted if str(mutant) not in equivalent]
    if options.again:
        lines = [line for line in options.again.read_text(encoding="utf-8").splitlines() if "SURVIVED" in line]
        wanted = [mutant for mutant in wanted if any(line.endswith(f"  {mutant}") for line in lines)]
    counts, ends = Counter(), time.monotonic() + 60 * options.minutes
    ConjectureRunner.shrink_interesting_examples = lambda self: None  # a failure is enough, it need not be small

    record = read_record()
    chosen = partial(tests_of, record=record, thorough=options.thorough)
    at_import = partial(acts_at_import, record=record)

    def attempt(mutant: Mutant, run: Callable[[], int]) -> None:
        """Try a mutant, and say what became of it."""
        if time.monotonic() > ends:
            counts["left out, as the time was over"] += 1
            return
        status = in_fork(run, options.thorough) if chosen(mutant) else 0
        outcome = "hangs" if status is None else "noticed" if status else "SURVIVED"
        counts[outcome] += 1
        number = sum(counts.values())
        line = f"{number:4} of {len(wanted)}  {outcome:8}  line {mutant.line:3}  {mutant}"
        print(line, file=sys.__stderr__, flush=True)

    with tempfile.TemporaryDirectory() as folder:
        quiet = [*QUIET, f"--basetemp={folder}/tests"]
        for mutant in filter(at_import, wanted):  # before anything of the pack is imported
            attempt(mutant, partial(import_changed, mutant, [*quiet, *chosen(mutant)]))
        trials = Trials([mutant for mutant in wanted if not at_import(mutant)], chosen, attempt)
        pytest.main([*quiet, *options.tests], plugins=[trials])
    tried = counts["noticed"] + counts["hangs"] + counts["SURVIVED"]
    print(dict(counts), f"noticed: {1 - counts['SURVIVED'] / max(tried, 1):.1%} of {tried}", file=sys.__stderr__)


if __name__ == "__main__":
    main()
