"""Changing code that is loaded, or about to be."""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from types import CodeType, FunctionType

import pytest
from _pytest.main import pytest_runtestloop

from .mutations import Mutant
from .record import ROOT


class Trials:
    """A pytest plugin that, instead of all tests, runs the ``chosen`` ones of each mutant in a fork, which
    ``attempt`` makes."""

    def __init__(
        self,
        wanted: list[Mutant],
        chosen: Callable[[Mutant], list[str]],
        attempt: Callable[[Mutant, Callable[[], int]], None],
    ):
        self.wanted, self.chosen, self.attempt = wanted, chosen, attempt

    def pytest_runtestloop(self, session) -> bool:
        items = {item.nodeid: item for item in session.items}
        for mutant in self.wanted:

            def run(mutant=mutant) -> int:
                swap_code(mutant)
                session.config.pluginmanager.unregister(name="terminalreporter")
                session.items = [items[test] for test in self.chosen(mutant) if test in items]
                try:
                    pytest_runtestloop(session)
                except session.Failed:
                    return 1
                return session.testsfailed

            self.attempt(mutant, run)
        return True


def swap_code(mutant: Mutant) -> None:
    """Give the functions of the file their changed code in place, because other modules have imported them by name."""
    path, codes = str(ROOT / mutant.file), defaultdict(list)

    def collect(code: CodeType) -> None:
        codes[code.co_qualname, code.co_firstlineno].append(code)
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                collect(constant)

    collect(compile(mutant.tree, path, "exec", dont_inherit=True))
    for function in gc.get_objects():
        if isinstance(function, FunctionType) and function.__code__.co_filename == path:
            [*found] = codes[function.__code__.co_qualname, function.__code__.co_firstlineno]
            if len(found) == 1 and found[0].co_freevars == function.__code__.co_freevars:
                function.__code__ = found[0]


def import_changed(mutant: Mutant, arguments: list[str]) -> int:
    """The exit status of pytest where the import of the file runs its changed source."""
    get_code, path = SourceFileLoader.get_code, str(ROOT / mutant.file)

    def changed(self: SourceFileLoader, name: str) -> CodeType:
        return compile(mutant.tree, path, "exec", dont_inherit=True) if self.path == path else get_code(self, name)

    SourceFileLoader.get_code = changed
    return pytest.main(arguments)
