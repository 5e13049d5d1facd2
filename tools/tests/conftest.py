"""What every test of the tools begins with, as in tests/unit: the same random numbers, whatever ran before it."""

from pathlib import Path

import pytest
import torch
from comfyui_specar.tests.support.fixtures import steady_clock  # noqa: F401


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.whole)


@pytest.fixture(autouse=True)
def same_random_numbers() -> None:
    torch.manual_seed(0)
