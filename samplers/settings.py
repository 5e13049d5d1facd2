"""Settings that declare their legal values: fields of the dataclasses of rules, structures and schedules."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from typing import Any


@dataclass(frozen=True)
class Setting:
    """Legal values: one of ``options``, or low <= value <= high (infinite high: any finite number >= low).

    exact: the value that makes a relaxed rule exact. advice: sensible values, in words. shown: is it part of a report.
    above: is ``low`` itself illegal.
    """

    low: float = -math.inf
    high: float = math.inf
    options: tuple[str, ...] = ()
    exact: float | None = None
    advice: str = ""
    shown: bool = True
    above: bool = False

    def legal(self, value: Any) -> bool:
        if self.options:
            return value in self.options
        return self.low <= value <= self.high and value < math.inf and not (self.above and value == self.low)

    def check(self, name: str, value: Any) -> None:
        """Raise ValueError for an illegal value, TypeError if it is no number and should be."""
        if not self.options and not isinstance(value, Real):
            raise TypeError(f"{name} is {value!r}, but must be a number.")
        if not self.legal(value):
            raise ValueError(f"{name} is {value!r}; {self}.")

    def __str__(self) -> str:
        if self.options:
            return f"choose one of {', '.join(map(repr, self.options))}"  # some contain commas
        low = f"{self.low:g}" + (" (exact)" if self.exact == self.low else "")
        if self.above:
            words = f"must be above {low}" + ("" if self.high == math.inf else f" and at most {self.high:g}")
        else:
            words = f"must be at least {low}" if self.high == math.inf else f"must be {low} to {self.high:g}"
        return words + (f"; {self.advice}" if self.advice else "")


def within(low: int, high: int, otherwise: str) -> str:
    """Which whole numbers are legal, for messages: "use 2 to 16"; ``otherwise``, what to do instead, if none is."""
    if low > high:
        return otherwise
    return f"use {low} to {high}" if low < high else f"use {low}"


def setting(
    default: Any,
    low: float = -math.inf,
    high: float = math.inf,
    *,
    options: tuple[str, ...] = (),
    exact: float | None = None,
    advice: str = "",
    shown: bool = True,
    above: bool = False,
) -> Any:
    """A dataclass field that declares its legal values (see Setting)."""
    return field(default=default, metadata={"setting": Setting(low, high, options, exact, advice, shown, above)})


def settings_of(owner: Any) -> dict[str, Setting]:
    """The declared settings of a dataclass or an instance of it, by name."""
    return {each.name: each.metadata["setting"] for each in fields(owner) if "setting" in each.metadata}


def check_settings(owner: Any) -> None:
    """Raise ValueError naming the first illegal setting and its legal values, TypeError if it is no number and should
    be. None is legal where it is the default: the method chooses."""
    for each in fields(owner):
        value = getattr(owner, each.name)
        if "setting" in each.metadata and not (value is None and each.default is None):
            each.metadata["setting"].check(each.name, value)
            if each.type.startswith("int") and not isinstance(value, Integral):
                raise TypeError(f"{each.name} is {value!r}, but must be a whole number.")
