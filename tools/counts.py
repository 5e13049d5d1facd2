"""Counts what grows unnoticed: python -m tools.counts [--list]

* lines of Python of the pack, of its tools and of all tests; entries of the top level
* methods of the largest class
* past participles: public functions and methods called ``opened`` or ``held_by``. Do they return, change or test?
* several meanings: public functions and classes of one name in two or more modules. Modules that stand side by side, as
  those of families, decoders and networks do, or a kernel beside its reference, count as one.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACK = ("limits", "device", "kernels", "models", "model_loaders", "samplers", "reports", "nodes", "batch")
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
SIDE_BY_SIDE = {  # folder -> the one module that its files count as
    "model_loaders/families": "model_loaders/families",
    "model_loaders/decoders": "model_loaders/families",
    "models/networks": "models/networks",
}
IRREGULAR = (
    "begun built chosen cut done drawn fed found given gone heard held kept known laid lent lost made meant met paid "
    "said seen sent shown shut spent taken thought told understood worn written"
).split()
OTHERS = ("embed", "feed", "need", "seed", "speed")  # that end as participles do
PREPOSITIONS = ("after", "as", "at", "by", "for", "from", "in", "of", "on", "out", "over", "to", "up", "with")


def is_participle(name: str) -> bool:
    first, *rest = name.split("_")
    regular = first.endswith("ed") and first not in OTHERS
    return (regular or first in IRREGULAR) and all(word in PREPOSITIONS for word in rest)


def module(path: Path) -> str:
    name = path.relative_to(ROOT).with_suffix("").as_posix()
    return next((one for folder, one in SIDE_BY_SIDE.items() if name.startswith(folder)), name.removesuffix("_triton"))


def count_lines() -> dict[str, int]:
    """Lines of the files that git knows."""
    found = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    names = [name for name in found.stdout.splitlines() if (ROOT / name).exists()]
    lines = {"pack": 0, "tools": 0, "tests": 0}
    for name in (name for name in names if name.endswith(".py")):
        folders = Path(name).parts[:-1]
        part = "tests" if "tests" in folders else "tools" if "tools" in folders else "pack"
        lines[part] += len((ROOT / name).read_text(encoding="utf-8").splitlines())
    entries = {name.split("/")[0] for name in names if not name.startswith(".")}
    return {**{f"lines, {part}": count for part, count in lines.items()}, "entries of the top level": len(entries)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="also say where they are")
    options = parser.parse_args()
    for title, count in count_lines().items():
        print(f"{title}: {count}")
    participles, places, sizes = defaultdict(set), defaultdict(set), {}
    for path in sorted(path for package in PACK for path in (ROOT / package).rglob("*.py")):
        top = ast.parse(path.read_text(encoding="utf-8")).body
        classes = [node for node in top if isinstance(node, ast.ClassDef)]
        for each in classes:
            sizes[f"{each.name} in {path.relative_to(ROOT)}"] = sum(isinstance(inner, FUNCTION) for inner in each.body)
        for node in [*top, *(inner for each in classes for inner in each.body)]:
            if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name.startswith("_"):
                continue
            if node in top:
                places[node.name].add(module(path))
            read = any("property" in ast.unparse(decorator) for decorator in node.decorator_list)
            if isinstance(node, ast.FunctionDef) and not read and is_participle(node.name):
                participles[node.name].add(module(path))
    largest = max(sizes, key=lambda name: sizes[name])
    print(f"methods of the largest class: {sizes[largest]} ({largest})")
    several = {name: where for name, where in places.items() if len(where) > 1}
    for title, found in (("past participles", participles), ("several meanings", several)):
        print(f"{title}: {len(found)}")
        for name, where in sorted(found.items()) if options.list else ():
            print(f"  {name}: {', '.join(sorted(where))}")


if __name__ == "__main__":
    main()
