"""Two images of each kind of method in one server, whose only custom nodes are ours: tools/releases.sh runs this on
releases of ComfyUI."""

import numpy as np
import pytest

from tests.conftest import Comfy
from tools.comfy_server import ComfyServer

pytestmark = pytest.mark.whole

WORKFLOWS = ("01 Text to image", "11 Method - EAGLE draft tree", "17 Continuous tokens")


@pytest.mark.releases
def test_a_second_image_is_made_as_the_first(comfyui, tmp_path):
    with ComfyServer(comfyui, tmp_path / "server.log") as server:
        comfy = Comfy(server)
        first, second, again = (
            [comfy.drawn(comfy.workflow(name, seed=seed)) for name in WORKFLOWS] for seed in (1, 2, 1)
        )
        assert "Traceback" not in server.log.read_text(errors="replace", encoding="utf-8")
    for name, *images in zip(WORKFLOWS, first, second, again, strict=True):
        a, b, c = map(np.stack, images)
        assert (a != b).any() and (a == c).all(), name
