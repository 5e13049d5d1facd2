"""Fixtures of the tests on a real server."""

import pytest

from tests.support.families import FAMILIES, Placed


@pytest.fixture(scope="module")
def models(comfy):
    """models/ of the server with the files of all families."""
    placed = Placed(comfy.base / "models")
    for name in ("ar_models", "ar_drafters"):
        (placed.models / name).mkdir(exist_ok=True)
    for write in FAMILIES.values():
        write(placed.models)
    yield placed.models
    placed.remove()
