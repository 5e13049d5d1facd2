"""Give every loader damaged and malicious files, and count the outcomes.

    python -m tools.benchmarks fuzz [--minutes 20 | --cases 500] [--seed 0] [--only Janus] [--out FILE]

A case is a folder of valid files of one family, of which one or two are changed (see tests/support/fuzz.py), then
loaded and used. It may work or be rejected with a message. Anything else is a problem: another exception, a message
that names no file, more than 1 GB of memory beyond the size of the files, more than ten seconds, a crashed process, or
code run, a file opened for writing or data sent on behalf of the file. Cases run one after the other in a separate
process with limited memory, so that crashes are counted. --seed and the number of a case determine it: --case N runs
only that one and shows where it fails.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import select
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter, defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Any

from . import report

MOST_MEMORY = 1 << 30  # bytes beyond the files' own
LARGEST_FILE = 3 << 30  # bytes
MOST_SECONDS = 10  # of the processor
PATIENCE = 120  # seconds of the clock before a case counts as one that never ends
PATIENCE_AT_FIRST = 1200  # the same before the first case: the process imports everything and writes its seeds first
WATCHED = (
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.spawn",
    "os.fork",
    "subprocess.Popen",
    "socket.",
    "shutil.",
    "os.remove",
    "os.rename",
    "os.rmdir",
    "os.mkdir",
    "os.link",
    "os.symlink",
    "ctypes.dlopen",
    "urllib.",
)


class Watch:
    """Sees what Python does while a case runs (sys.addaudithook)."""

    def __init__(self) -> None:
        self.on, self.seen = False, list[str]()
        sys.addaudithook(self.hear)

    def hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.on:
            return
        flags = arguments[2] if event == "open" and isinstance(arguments[2], int) else 0
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) or event.startswith(WATCHED):
            self.seen.append(f"{event} {arguments!r:.200}")


def memory(what: str = "VmHWM") -> int:
    """Bytes of memory: the most that were in use since forget_memory(), or another line of /proc/self/status."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(what))


def forget_memory() -> None:
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


def work(seed: int, numbers: range, only: str) -> None:
    """Run cases, and write a line before and after each."""
    from tests.support import fuzz, fuzz_seeds

    warnings.filterwarnings("ignore")
    lines = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # libraries write there too
    watch = Watch()
    sound = Path(tempfile.mkdtemp(dir=os.environ["FUZZ_FOLDER"]))
    seeds = {name: one for name, one in fuzz_seeds.SEEDS.items() if only.lower() in name.lower()}
    for name, one in seeds.items():  # also imports all that is ever imported, which takes memory
        (folder := sound / name).mkdir()
        one.write(folder)
        fuzz_seeds.examine(one, folder)
    limit = memory("VmSize") + 3 * MOST_MEMORY + LARGEST_FILE  # files are mapped
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    for number in numbers:
        rng = random.Random(f"{seed}/{number}")
        name = rng.choice(list(seeds))
        folder = sound.with_name("case") / name
        shutil.rmtree(folder.parent, ignore_errors=True)
        shutil.copytree(sound / name, folder)
        done = fuzz.mutate(folder, rng)
        lines.write(json.dumps({"number": number, "seed": name, "mutation": done}) + "\n")
        lines.flush()
        size = sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())
        forget_memory()
        before, began = memory(), time.process_time()
        watch.on = True
        outcome = fuzz_seeds.examine(seeds[name], folder)
        watch.on = False
        seconds, used = time.process_time() - began, max(0, memory() - before - size)
        problem = outcome.problem
        if watch.seen:
            problem = f"did {watch.seen[0]}"
        elif problem is None and used > MOST_MEMORY:
            problem = "took too much memory"
        elif problem is None and seconds > MOST_SECONDS:
            problem = "took too long"
        watch.seen.clear()
        lines.write(
            json.dumps(
                {
                    "error": outcome.error,
                    "message": outcome.message,
                    "problem": problem,
                    "seconds": round(seconds, 2),
                    "megabytes": used >> 20,
                }
            )
            + "\n"
        )
        lines.flush()


def command(options: argparse.Namespace, first: int) -> list[str]:
    """What runs the cases from ``first`` on."""
    return [
        sys.executable,
        "-m",
        "tools.benchmarks.fuzz",
        "--work",
        str(first),
        "--seed",
        str(options.seed),
        "--only",
        options.only,
    ]


class Worker:
    """A process that runs the cases from ``first`` on."""

    def __init__(self, options: argparse.Namespace, first: int, folder: str):
        environment = os.environ | {
            "FUZZ_FOLDER": folder,
            "PYTHONDONTWRITEBYTECODE": "1",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        self.errors = tempfile.TemporaryFile(mode="w+", encoding="utf-8")
        self.process = subprocess.Popen(
            command(options, first),
            stdout=subprocess.PIPE,
            stderr=self.errors,
            env=environment,
            cwd=Path(__file__).resolve().parents[2],
        )
        self.buffer, self.closed = b"", False

    def line(self, patience: float) -> dict[str, Any] | None:
        """What it says next; None if it died or says nothing any more."""
        until, source = time.monotonic() + patience, self.process.stdout.fileno()
        while b"\n" not in self.buffer:
            ready, _, _ = select.select([source], [], [], max(0, until - time.monotonic()))
            read = os.read(source, 1 << 16) if ready else b""
            if not read:
                self.closed = bool(ready)
                return None
            self.buffer += read
        text, _, self.buffer = self.buffer.partition(b"\n")
        return json.loads(text)

    def end(self) -> str:
        """Stop it, and say how it ended by itself, if it did: it closes its output a moment before it is gone."""
        if self.closed:
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(PATIENCE)
        code = self.process.poll()
        self.process.kill()
        self.process.wait()
        self.errors.seek(0)
        last = self.errors.read()[-500:].strip()
        self.errors.close()
        return "never ended" if code is None else f"killed the process (exit code {code}): {last}"


class Tally:
    """Counts of what happened so far."""

    def __init__(self) -> None:
        self.cases, self.outcomes = 0, Counter[str]()
        self.families: dict[str, Counter[str]] = defaultdict(Counter)
        self.mutations: dict[str, Counter[str]] = defaultdict(Counter)
        self.problems: list[dict[str, Any]] = []
        self.slowest = self.largest = {"seconds": 0.0, "megabytes": 0}

    def add(self, case: dict[str, Any]) -> None:
        outcome = "problem" if case["problem"] else case["error"] or "loaded"
        self.cases += 1
        self.outcomes[outcome] += 1
        self.families[case["seed"]][outcome] += 1
        for each in case["mutation"].split(", "):
            self.mutations[each.partition(":")[0]][outcome] += 1
        self.slowest = max(self.slowest, case, key=lambda one: one["seconds"])
        self.largest = max(self.largest, case, key=lambda one: one["megabytes"])
        if case["problem"]:
            self.problems.append(case)

    def report(self) -> dict[str, Any]:
        def brief(case: dict[str, Any]) -> dict[str, Any]:
            return {key: value[:300] if isinstance(value, str) else value for key, value in case.items()}

        problems = [case["problem"] for case in self.problems]
        return {
            "cases": self.cases,
            "outcomes": dict(self.outcomes.most_common()),
            "deaths": sum(text.startswith(("killed", "never", "ends")) for text in problems),
            "executed": sum(text.startswith(("ran", "did ")) for text in problems),
            "families": {name: dict(count) for name, count in sorted(self.families.items())},
            "mutations": {name: dict(count) for name, count in sorted(self.mutations.items())},
            "slowest": brief(self.slowest),
            "largest": brief(self.largest),
            "problems": [*map(brief, self.problems)],
        }


def save(options: argparse.Namespace, tally: Tally, minutes: float) -> None:
    """Write the report, so far as it has come."""
    import torch

    about = {"commit": report.commit(), "machine": report.machine(torch.device("cpu")), "versions": report.versions()}
    report.write(about | {"seed": options.seed, "minutes": round(minutes, 1)} | tally.report(), options.out)


def run(options: argparse.Namespace, folder: str) -> Tally:
    """Cases until there were enough, or the time is over."""
    tally, number, began, shown = Tally(), options.case or 0, time.monotonic(), Counter[str]()
    last = number + (1 if options.case is not None else options.cases or 10**9)
    worker = None
    endless = options.case is not None or options.cases
    while number < last and (endless or time.monotonic() - began < 60 * options.minutes):
        started, worker = worker is None, worker or Worker(options, number, folder)
        case = worker.line(PATIENCE_AT_FIRST if started else PATIENCE)
        if case is None:
            raise RuntimeError(f"The process that runs the cases {worker.end()}")
        outcome = worker.line(PATIENCE)
        if outcome is None:
            outcome = {"error": None, "message": "", "problem": worker.end(), "seconds": 0.0, "megabytes": 0}
            worker = None
        tally.add(case | outcome)
        if outcome["problem"]:
            shown[outcome["problem"][:60]] += 1
            if shown[outcome["problem"][:60]] <= 3:
                print(
                    f"{case['number']}: {case['seed']}: {case['mutation']}\n    {outcome['problem']}\n    "
                    f"{outcome['error']}: {outcome['message'][:300]}",
                    flush=True,
                )
        number += 1
        if tally.cases % 500 == 0:
            print(f"{tally.cases} cases, {dict(tally.outcomes)}", flush=True)
            if options.out:
                save(options, tally, (time.monotonic() - began) / 60)
    if worker is not None:
        worker.end()
    return tally


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tools.benchmarks fuzz",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=20, help="duration (default: %(default)s)")
    parser.add_argument("--cases", type=int, help="run this many cases instead, without a time limit")
    parser.add_argument("--seed", type=int, default=0, help="seed of all cases (default: %(default)s)")
    parser.add_argument("--case", type=int, help="run only the case of this number")
    parser.add_argument("--only", default="", help="use only families whose name contains this")
    parser.add_argument("--out", type=Path, help="JSON report to write")
    parser.add_argument("--work", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work is not None:
        work(options.seed, range(options.work, 10**9), options.only)
        return
    began, folder = time.monotonic(), tempfile.mkdtemp()
    try:
        tally = run(options, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    result = tally.report()
    reported = ("cases", "outcomes", "deaths", "executed", "slowest", "largest")
    print(json.dumps({key: result[key] for key in reported}, indent=1))
    if options.out:
        save(options, tally, (time.monotonic() - began) / 60)
        print(f"written to {options.out}")
    sys.exit(bool(tally.problems))


if __name__ == "__main__":
    main()
