"""GLM-Image's autoregressive stage against transformers' class, live, on the same random weights.

The class keeps the positions of the tokens to come inside itself, and the official pipeline samples from all rows of
its head; both are asked here for the image codes alone, the preview first and then the image, in one sequence.
"""

import pytest
import torch
from comfyui_specar import api
from comfyui_specar.model_loaders.families import glm_image
from comfyui_specar.model_loaders.files.checkpoint import open_checkpoint
from comfyui_specar.models.networks.glm_image import preview_grid
from comfyui_specar.samplers.methods.jacobi import SJD
from comfyui_specar.samplers.methods.next_token import NextToken
from safetensors.torch import load_file

from ..support.closeness import assert_as_exact, decided, fp64
from ..support.models import teacher_forced
from ..support.tiny_glm_image import BEGIN, CODES, config, official, vocabulary, write

transformers = pytest.importorskip("transformers", minversion="5.0")

GRID, SIDE = (4, 6), 3
PREVIEW = (2, 3)  # int(sqrt(4 / 6) * 3), int(sqrt(6 / 4) * 3)
LENGTH = 2 * 3 + 4 * 6
CODED = torch.tensor([[(7 * i + 3) % CODES for i in range(LENGTH)]])
IDS = [
    vocabulary()[word]
    for word in ("a", "red", "cup", "<sop>", "4", "6", "<eop>", "<sop>", "2", "3", "<eop>", f"<|dit_token_{BEGIN}|>")
]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Our model, and the reference with the file's weights, in fp64."""
    file = write(tmp_path_factory.mktemp("release"), grid=GRID, preview_side=SIDE) / "model.safetensors"
    settings = config()
    del settings["specar"], settings["architectures"], settings["model_type"]
    weights = load_file(file)
    with fp64():
        made = transformers.GlmImageConfig(**settings)
        reference = transformers.GlmImageForConditionalGeneration(made).eval().requires_grad_(False)
        missing, unexpected = reference.load_state_dict(weights, strict=False)
    assert not unexpected and all(name.startswith(("model.visual.", "model.vqmodel.")) for name in missing)
    return glm_image.load(open_checkpoint(file), torch.float32, None, ()), reference


def official_after_a_preview(reference, codes=None):
    grids = torch.tensor([[1, *GRID], [1, *PREVIEW]])
    inputs = {"input_ids": torch.tensor([IDS]), "image_grid_thw": grids, "images_per_sample": torch.tensor([2])}
    return official(reference, inputs, LENGTH, codes)


def test_the_prompt_names_both_grids(pair):
    model, _ = pair
    assert model.encode_prompt("a red cup")[0][0].flatten().tolist() == IDS


def test_teacher_forced_logits(pair):
    model, reference = pair
    prompt = model.encode_prompt("a red cup")
    assert_as_exact(lambda: teacher_forced(model, prompt, CODED), official_after_a_preview(reference, CODED)[1])


def test_hidden_states_and_logits_step_by_step(pair):
    """Windows that end in the preview, cross into the image and lie in it, then single tokens."""
    model, reference = pair
    prompt = model.encode_prompt("a red cup")

    def compute():
        state = model.start(prompt, None, 1, model.layout(), 1, guided=False)
        outs, position = [state.prefill], 0
        for count in (4, 5, 7, *[1] * (LENGTH - 17)):
            places = torch.arange(position, position + count)[None]
            outs.append(model.step(state, CODED[:, position : position + count], places))
            model.commit(state, torch.tensor([count]))
            position += count
        return torch.cat([out.hidden for out in outs], dim=1), torch.cat([out.logits for out in outs], dim=1)

    assert_as_exact(compute, [*official_after_a_preview(reference, CODED)[:2]])


@pytest.mark.parametrize("method", [NextToken(), SJD(window=5)], ids=str)
def test_greedy_tokens(pair, method):
    model, reference = pair
    prompt = model.encode_prompt("a red cup")
    tokens = decided(lambda: api.sample(model, prompt, method, temperature=0).tokens)
    assert tokens.flatten().tolist() == official_after_a_preview(reference)[2][0, 6:].tolist()


def test_positions(pair):
    """The preview starts after 12 prompt tokens, the image after the preview's 3 columns."""
    model, reference = pair
    official_after_a_preview(reference, CODED)
    wanted = reference.model._cached_decode_position_ids[0, :, :LENGTH]
    assert wanted[:, [0, 5, 6, LENGTH - 1]].T.tolist() == [[12, 12, 12], [12, 13, 14], [15, 15, 15], [15, 18, 20]]
    places, theta = torch.arange(LENGTH)[None], model.positions.theta
    found = model.positions.image(places, torch.tensor([12]), GRID, 16)
    axes = torch.tensor([0, 1, 2, 2])  # of the 4 pairs that turn; the other 4 of 8 stay
    angles = wanted[axes].T.float() * theta ** (-torch.arange(4) / 4)
    torch.testing.assert_close(found.cos[0], torch.nn.functional.pad(angles, (0, 4)).cos())
    torch.testing.assert_close(found.sin[0], torch.nn.functional.pad(angles, (0, 4)).sin())


def test_grids_of_previews():
    from transformers.models.glm_image.processing_glm_image import GlmImageProcessor

    for rows, cols in glm_image._GRIDS:
        wanted = GlmImageProcessor._get_target_shape(None, rows * 32, cols * 32)
        assert (rows, cols, *preview_grid((rows, cols))) == wanted
    assert preview_grid((36, 24)) == (19, 13)
