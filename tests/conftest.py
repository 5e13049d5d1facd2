"""Fixtures shared by the tests that need a running ComfyUI (tests/e2e and tests/browser): one server per session."""

import asyncio
import io
import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.support.patience import PATIENCE
from tools import comfy_client
from tools.comfy_server import PACK, ComfyServer

WORKFLOWS = PACK / "workflows"
DYNAMIC_VRAM = Path(__file__).parent / "custom_nodes/simulated_dynamic_vram"  # as on an NVIDIA card


# On an older processor oneDNN knows as little as ATen. Knowing only of ATen, the attention of bf16 asks it for AVX-512.
OLDER = {"default": "SSE41", "avx2": "AVX2"}
if (_capability := os.environ.get("ATEN_CPU_CAPABILITY")) in OLDER:
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", OLDER[_capability])


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-contract", action="store_true", help="rewrite tests/e2e/object_info.json from the server")


class Comfy:
    """The running server, as the tests talk to it."""

    def __init__(self, server: ComfyServer):
        self.url, self.base, self.output, self.pid = server.url, server.base, server.output, server.process.pid
        self.log, self.port = server.log, server.port

    def run(self, prompt: dict, follow: comfy_client.Follower | None = None) -> comfy_client.Run:
        return asyncio.run(comfy_client.run_prompt(self.url, prompt, follow=follow, timeout=PATIENCE))

    def get(self, path: str):
        return asyncio.run(comfy_client.get_json(self.url, path))

    def view(self, file: dict) -> bytes:
        return asyncio.run(comfy_client.view(self.url, file))

    def drawn(self, prompt: dict) -> list[np.ndarray]:
        """Runs a prompt and returns the images that it saves of what was decoded, without maps."""
        run = self.run(prompt)
        assert run.outcome == "success", run.message()
        decoded = {key for key, node in prompt.items() if node["class_type"] == "VAEDecode"}
        files = [
            file
            for key, node in prompt.items()
            if node["class_type"] == "SaveImage" and node["inputs"]["images"][0] in decoded
            for file in run.outputs[key]["images"]
        ]
        assert files
        return [np.asarray(Image.open(io.BytesIO(self.view(file)))) for file in files]

    @staticmethod
    def workflow(name: str, **inputs) -> dict:
        """A shipped API workflow; every node input named in `inputs` is set to the given value."""
        prompt = json.loads((WORKFLOWS / "api" / f"{name}.json").read_text(encoding="utf-8"))
        for node in prompt.values():
            node["inputs"].update({key: value for key, value in inputs.items() if key in node["inputs"]})
        return prompt

    @staticmethod
    def node_id(prompt: dict, class_type: str) -> str:
        """The key of the only node of a class; ValueError if there are several or none."""
        [key] = [key for key, node in prompt.items() if node["class_type"] == class_type]
        return key


@pytest.fixture(scope="session")
def comfyui() -> Path:
    """The ComfyUI tree."""
    path = os.environ.get("COMFYUI_PATH")
    if not path:
        pytest.fail("COMFYUI_PATH does not name a ComfyUI tree: run tools/test.sh, which sets everything up")
    return Path(path)


@pytest.fixture(scope="session")
def comfy(comfyui: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Comfy]:
    log = tmp_path_factory.mktemp("comfyui") / "server.log"
    with ComfyServer(comfyui, log, more_nodes=[DYNAMIC_VRAM]) as server:
        yield Comfy(server)
