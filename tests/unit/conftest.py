"""What every unit test begins with: the same random numbers, whatever ran before it. And fixtures they share."""

import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from comfyui_specar.limits import replacing as files
from comfyui_specar.model_loaders.detect import load_drafter
from comfyui_specar.models.discrete_model import DiscreteModel
from comfyui_specar.models.drafters import ModelDrafter
from comfyui_specar.samplers.contract import Drafter
from hypothesis import HealthCheck, settings

from ..support.fake_comfy import here, table  # noqa: F401
from ..support.fixtures import captures_work, costs_of_captures, may_fail, on_tape, steady_clock  # noqa: F401
from ..support.tiny import fill, llamagen, write_eagle

settings.register_profile(
    "specar", derandomize="SPECAR_FUZZ" not in os.environ, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)  # no test depends on how long it takes
settings.load_profile("specar")


@pytest.fixture(autouse=True)
def same_random_numbers() -> None:
    """For what samples from torch's own generator."""
    torch.manual_seed(0)


@pytest.fixture
def without_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture
def locked(monkeypatch) -> Callable[[dict[str, int]], Counter]:
    """locked({"a.png": 2}): the first two attempts to replace a file of that name fail as they do on Windows while
    another program has it open. Returns how often each file was tried."""
    replace, attempts = Path.replace, Counter()

    def install(refusals: dict[str, int]) -> Counter:
        def refusing(part: Path, target: Path) -> Path:
            name = Path(target).name
            attempts[name] += 1
            if attempts[name] <= refusals.get(name, 0):
                raise PermissionError(13, "Permission denied", str(part), None, str(target))
            return replace(part, target)

        monkeypatch.setattr(Path, "replace", refusing)
        monkeypatch.setattr(files, "PAUSES", (0.001,) * len(files.PAUSES))
        return attempts

    return install


@pytest.fixture(scope="module")
def text_model(tmp_path_factory) -> DiscreteModel:
    """A tiny LlamaGen that reads captions, with a codebook."""
    model = llamagen(tmp_path_factory.mktemp("tiny"), text=True)
    model.attach_codebook(fill("codebook embedding", (model.vocab, 4)), 16)
    return model


@pytest.fixture(scope="module")
def text_drafters(text_model, tmp_path_factory) -> dict[str, Drafter]:
    """Its drafters: an EAGLE, and the model itself."""
    path = write_eagle(tmp_path_factory.mktemp("eagle"), input_type=None)
    return {"eagle": load_drafter(path, text_model), "model": ModelDrafter(text_model)}
