"""How guidance, temperatures, top-k and top-p change next-token images, and the passes that speculation takes:
``python -m tools.benchmarks quality --map``.

One axis at a time, around the settings of everything else that is measured, and the bundled model's own.
Likelihood is always the model's at those settings, without filters, so that all rows have the same yardstick.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from .feature_spaces import Spaces
from .quality_cases import Prompt
from .quality_draw import Drawn
from .quality_model import ModelUnderTest, in_words

AXES: dict[str, Sequence[Any]] = {
    "cfg": (1.0, 2.0, 3.0, 5.0),
    "temperature": (0.7, 0.85, 1.0),
    "top_k": (100, 400),
    "top_p": (0.8, 0.95),
    "entropy": ((2.5, 3.0, 0.6), (1.0, 1.0, 0.6)),  # the paper's, and one that cools what is less certain than 0.9 nats
}
WORDS = {
    "cfg": "guidance",
    "temperature": "temperature",
    "top_k": "top-k",
    "top_p": "top-p",
    "entropy": "entropy temperature",
}
OWN = {"temperature": 0.9, "top_p": 0.9}  # the bundled model's own and the templates', beside its guidance of 2
PLAIN, FAST = "next_token", "sjd coupled w32"  # whose images are measured; whose passes are counted


def points(base: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Sampling parameters by name: ``base`` first, then the model's own, then those that differ from it in one."""
    found = {f"guidance {base['cfg']:g}, temperature {base['temperature']:g}": base}
    found[", ".join(f"{WORDS[key]} {value:g}" for key, value in OWN.items())] = base | OWN
    for key, values in AXES.items():
        found |= {f"{WORDS[key]} {in_words(value)}": base | {key: value} for value in values if value != base.get(key)}
    return found


def at(tested: ModelUnderTest, parameters: dict[str, Any]) -> ModelUnderTest:
    """The model with the two cases of the map, at a point of it. Its images are those of a run with this guidance."""
    by_name = {case.name: case for case in tested.cases}
    return replace(tested, cases=[by_name[PLAIN], by_name[FAST]], parameters=parameters)


def draw(tested: ModelUnderTest, wanted: Sequence[Prompt], batch: int, only: Sequence[str] | None) -> None:
    """The images of all points, or of ``only`` some."""
    for name, parameters in points(tested.parameters).items():
        if not only or name in only:
            print(name, flush=True)
            point = at(tested, parameters)
            for case in point.cases:
                point.draw(case, wanted, batch)


def measure(tested: ModelUnderTest, wanted: Sequence[Prompt], spaces: Spaces) -> dict[str, Any]:
    """The report on the points of which enough images were drawn: a row has the passes of SJD, and the rest of
    next-token images. Raises ValueError without the first point."""
    every, count = points(tested.parameters), len(wanted)
    reference = at(tested, tested.parameters)
    for case in reference.cases:
        reference.check_drawn(case, count)
    drawn: dict[str, Drawn] = {}
    seen = {}
    for name, parameters in every.items():
        point = at(tested, parameters)
        plain, fast = (point.drawn(case, count) for case in point.cases)
        if plain is not None and fast is not None:
            drawn[name] = replace(plain, passes=fast.passes)
            seen[name] = point.look(point.cases[0], plain, wanted, spaces, tested.parameters["cfg"])
    return tested.report(every, drawn, seen, wanted, spaces)
