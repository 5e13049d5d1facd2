"""Reports of ``python -m tools.benchmarks quality``, which grow: rows of another run, or machine, join those of a
file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from .quality_measure import check

# What must be equal in all rows on a model. weights: checksums of the model's files by name.
SAME = ("weights", "dtype", "images", "prompts", "settings", "spaces", "classifier")


def rounded(tree: Any) -> Any:
    """A report with five significant digits, as it is read again from its file."""
    if isinstance(tree, Mapping):
        return {key: rounded(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [rounded(value) for value in tree]
    return float(f"{tree:.5g}") if isinstance(tree, float) else tree


def merged(earlier: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """The report with the rows of both. Of a case that both have, the ``new`` row is taken; all rows are in the order
    of the new report's cases. Models that only one of them has stay as they are.

    Every row keeps where it was measured. The check of the lossless methods is computed again, over all rows; "missing"
    are the cases that have none. p-values of a row belong to the reference of its own run, which may have been drawn on
    another machine: then its images differ in rounding, or in seeds' noise, but not in distribution.

    Raises ValueError, which says what differs, unless all rows are of the same model, classifier, prompts and settings.
    """
    check_joins(earlier, new)
    models = {model["name"]: model for model in earlier["models"]}
    for model in new["models"]:
        known = models.get(model["name"])
        models[model["name"]] = checked(_joined(known, model) if known else model, new["alarm_rate"])
    return {**new, "models": list(models.values())}


def check_joins(earlier: dict[str, Any], new: dict[str, Any]) -> None:
    """Raises ValueError unless rows of the ``new`` report may join the ``earlier`` one. Of models only SAME is
    compared: ``merged`` looks at the settings of single cases."""
    _same("alarm_rate", earlier["alarm_rate"], new["alarm_rate"])
    for model in new["models"]:
        for known in (known for known in earlier["models"] if known["name"] == model["name"]):
            for key in SAME:
                _same(f"{model['name']}, {key}", known[key], model[key])


def _joined(earlier: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """A model's rows of both."""
    rows = {row["name"]: row for row in earlier["rows"]}
    replaced = {row["name"] for row in new["rows"]}
    for name in rows.keys() - replaced:
        _same(f"{new['name']}, settings of {name!r}", earlier["cases"][name], new["cases"].get(name))
    rows |= {row["name"]: row for row in new["rows"]}
    return {**new, "rows": list(rows.values())}


def checked(model: dict[str, Any], alarm_rate: float) -> dict[str, Any]:
    """What a report has of a model, with its rows in order, and what follows from all of them."""
    rows = {row["name"]: dict(row) for row in model["rows"]}
    ordered = [rows[name] for name in model["cases"] if name in rows]
    missing = [name for name in model["cases"] if name not in rows]
    return {**model, "missing": missing, "rows": ordered, "outside": check(ordered, alarm_rate)}


def _same(what: str, earlier: Any, new: Any) -> None:
    if earlier != new:
        raise ValueError(
            f"The report that is there has other conditions: {what} is {_short(earlier)} there, and "
            f"{_short(new)} now. Measure everything again, into another --out, or take it out of the "
            "report."
        )


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 300 else f"{text[:300]}..."
