"""GLM-Image's autoregressive stage against transformers' classes, live, on the same random weights: after a prompt, and
after a prompt with source images.

The class keeps the positions of the tokens to come inside itself, and the official pipeline samples from all rows of
its head; both are asked here for the image codes alone, without source images the preview first and then the image, in
one sequence. The chat template is the release's, in other words: every image between the two signs, then the text.
GlmImageProcessor adds the size of the new image, and no preview.
"""

import pytest
import torch
from comfyui_specar import api
from comfyui_specar.model_loaders.detect import load_encoder
from comfyui_specar.model_loaders.families import glm_image
from comfyui_specar.model_loaders.families.glm_image_sources import Scaling
from comfyui_specar.models.networks.glm_image import preview_grid
from comfyui_specar.samplers.methods.jacobi import SJD
from comfyui_specar.samplers.methods.next_token import NextToken
from safetensors.torch import load_file

from ..support.closeness import assert_as_exact, decided, fp64
from ..support.models import teacher_forced
from ..support.tiny_glm_image import BEGIN, CODES, END, PREPROCESSOR, config, official, tokenizer, vocabulary, write

transformers = pytest.importorskip("transformers", minversion="5.0")

GRID, SIDE, TEXT = (4, 6), 32, "a red cup"  # tokens, the pixels of one
LENGTH = 4 * 6
PREVIEW = (2, 3)  # int(sqrt(4 / 6) * 3), int(sqrt(6 / 4) * 3)
SIZES = ((70, 111), (64, 64), (130, 300))  # of the source images, which become 2 x 3, 2 x 2 and 2 x 4 tokens
IDS = [
    vocabulary()[word]
    for word in ("a", "red", "cup", "<sop>", "4", "6", "<eop>", "<sop>", "2", "3", "<eop>", f"<|dit_token_{BEGIN}|>")
]
TEMPLATE = (
    "{% for message in messages %}{% for part in message.content %}{% if part.type == 'image' %}"
    f"<|dit_token_{BEGIN}|><|image|><|dit_token_{END}|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endfor %}"
)


def lead(count):
    """Tokens of the preview."""
    return 0 if count else PREVIEW[0] * PREVIEW[1]


def coded(count):
    """A sequence of codes."""
    return torch.tensor([[(7 * i + 3) % CODES for i in range(lead(count) + LENGTH)]])


def picture(height, width):
    """A smooth image [H, W, 3] of 8 bits."""
    rows, cols = torch.arange(height)[:, None] / height, torch.arange(width)[None] / width
    planes = torch.stack([(9 * rows + 5 * cols).sin(), (7 * cols - 3 * rows).cos(), (rows * cols * 11).sin()], -1)
    return ((planes / 2 + 0.5) * 255).round() / 255


def levels(image):
    return (image * 255).round().to(torch.uint8).movedim(-1, 0)


@pytest.fixture(scope="module")
def trio(tmp_path_factory):
    """Our model, our encoder, and the reference with the file's weights, in fp64."""
    folder = write(tmp_path_factory.mktemp("release"), grid=GRID, preview_side=3)
    settings = config()
    del settings["specar"], settings["architectures"], settings["model_type"]
    weights = load_file(folder / "model.safetensors")
    with fp64():
        made = transformers.GlmImageConfig(**settings)
        reference = transformers.GlmImageForConditionalGeneration(made).eval().requires_grad_(False)
        reference.load_state_dict(weights)
    model = api.load_model(folder)
    return model, load_encoder(folder, model), reference


@pytest.fixture(scope="module")
def processor():
    """transformers' processor with the tiny tokenizer and the settings of its files."""
    from transformers.models.glm_image.image_processing_glm_image import GlmImageImageProcessor

    names = {"image_token": "<|image|>", "grid_bos_token": "<sop>", "grid_eos_token": "<eop>"}
    signs = {"bos_token": f"<|dit_token_{BEGIN}|>", "eos_token": f"<|dit_token_{END}|>"}
    words = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer(), extra_special_tokens=names, pad_token="<|endoftext|>", **signs
    )
    images = GlmImageImageProcessor(**PREPROCESSOR)
    return transformers.GlmImageProcessor(image_processor=images, tokenizer=words, chat_template=TEMPLATE)


def inputs_of(processor, count):
    """What the official pipeline hands to the model."""
    from torchvision.transforms.functional import to_pil_image

    if not count:
        grids = torch.tensor([[1, *GRID], [1, *PREVIEW]])
        return {"input_ids": torch.tensor([IDS]), "image_grid_thw": grids, "images_per_sample": torch.tensor([2])}
    images = [{"type": "image", "image": to_pil_image(levels(picture(*size)))} for size in SIZES[:count]]
    message = {"role": "user", "content": [*images, {"type": "text", "text": TEXT}]}
    size = {"target_h": SIDE * GRID[0], "target_w": SIDE * GRID[1]}
    options = {"tokenize": True, "return_dict": True, "return_tensors": "pt"}
    return processor.apply_chat_template([message], **size, **options)


def sources(trio, count):
    """Our tokens of the same images."""
    model, encoder, _ = trio
    return [encoder(model.image_prompts.seen(picture(*size), SIDE)) for size in SIZES[:count]]


def wanted(trio, processor, count, codes=None):
    """Hidden states, logits and tokens of the reference."""
    return official(trio[2], inputs_of(processor, count), lead(count) + LENGTH, codes)


# Source images


def patches(image):
    """An image [H, W, 3] as its patches [n, 3 * 16 * 16]."""
    return image.unfold(0, 16, 16).unfold(1, 16, 16).flatten(0, 1).flatten(1)


def test_images_are_scaled_as_by_the_processor(processor):
    found = inputs_of(processor, 3)
    assert found["image_grid_thw"].tolist() == [[1, 2, 3], [1, 2, 2], [1, 2, 4], [1, *GRID]]
    scaling = Scaling(PREPROCESSOR["min_pixels"], PREPROCESSOR["max_pixels"])
    mean, std = (torch.tensor(each) for each in (scaling.image_mean, scaling.image_std))
    for size, wanted in zip(SIZES, found["pixel_values"].split([6, 4, 8]), strict=True):
        seen = scaling.scale_to_encode(picture(*size), SIDE)
        assert_as_exact(lambda seen=seen: patches((seen - mean) / std), wanted)


def test_grids_of_any_image():
    from transformers.models.glm_image.image_processing_glm_image import smart_resize

    scaling, count = Scaling(), 0
    for height in (*range(16, 600, 23), *range(600, 5000, 397)):
        for width in (*range(17, 620, 29), *range(620, 5200, 411)):
            if max(height, width) <= 4 * min(height, width):
                wanted = smart_resize(height, width, 16, scaling.min_pixels, scaling.max_pixels)
                assert tuple(16 * side for side in scaling.grid(height, width, 32)) == wanted
                count += 1
    assert count > 500


@torch.inference_mode()
def test_features_and_codes(trio, processor):
    model, encoder, reference = trio
    inputs = inputs_of(processor, 3)
    with fp64():
        grids = inputs["image_grid_thw"][:-1]
        wanted = reference.model.get_image_features(inputs["pixel_values"], grids, return_dict=True).pooler_output
        codes = [reference.model.get_image_tokens([each]) for each in wanted]
    for size, features, tokens in zip(SIZES, wanted, codes, strict=True):
        seen = model.image_prompts.seen(picture(*size), SIDE)
        assert_as_exact(lambda seen=seen: encoder.features(seen)[0], features.float())
        assert encoder(seen).flatten().tolist() == tokens.tolist()
    assert len({token for tokens in codes for token in tokens.tolist()}) > 5


# Prompts, and what follows them


def angles(places):
    """Of positions [3, n] on the axes: 4 pairs of channels turn, the other 4 stay."""
    turning = places[torch.tensor([0, 1, 2, 2])].T.float() * 10000.0 ** (-torch.arange(4) / 4)
    return torch.nn.functional.pad(turning, (0, 4))


def test_ids_and_positions_with_a_preview(trio, processor):
    """The preview starts after 12 prompt tokens, the image after the preview's 3 columns."""
    model, _, reference = trio
    assert model.encode_prompt(TEXT)[0][0].flatten().tolist() == IDS
    wanted(trio, processor, 0, coded(0))
    count = lead(0) + LENGTH
    places = reference.model._cached_decode_position_ids[0, :, :count]
    assert places[:, [0, 5, 6, count - 1]].T.tolist() == [[12, 12, 12], [12, 13, 14], [15, 15, 15], [15, 18, 20]]
    found = model.positions.image(torch.arange(count)[None], torch.tensor([12]), GRID, 16)
    torch.testing.assert_close(found.cos[0], angles(places).cos())
    torch.testing.assert_close(found.sin[0], angles(places).sin())


@pytest.mark.parametrize("count", [1, 2, 3])
@torch.inference_mode()
def test_ids_and_positions_with_images(trio, processor, count):
    model, _, reference = trio
    inputs, images = inputs_of(processor, count), sources(trio, count)
    ids = inputs["input_ids"][0]
    placed = ids.masked_scatter(ids == reference.config.image_token_id, torch.cat([each.flatten() for each in images]))
    assert [*model.prompt_encoder.ids(TEXT, GRID, images=images)] == placed.tolist()

    prompt, _ = reference.model.get_rope_index(
        placed[None], image_grid_thw=inputs["image_grid_thw"], images_per_sample=inputs["images_per_sample"]
    )
    image = reference.model._cached_decode_position_ids[0, :, :LENGTH]
    positions = model.positions.reading([(each.shape[0], each.shape[1]) for each in images])
    found = positions.prompt(len(ids), 16, "cpu").cos[0]
    torch.testing.assert_close(found, angles(prompt[:, 0]).cos())
    found = positions.image(torch.arange(LENGTH)[None], torch.tensor([len(ids)]), GRID, 16).cos[0]
    torch.testing.assert_close(found, angles(image).cos())
    assert model.layout(*GRID, images).lead == 0 and model.layout(*GRID).lead > 0


@pytest.mark.parametrize("count", [0, 1, 3])
def test_teacher_forced_logits(trio, processor, count):
    model, codes = trio[0], coded(count)
    prompt = model.encode_prompt(TEXT, sources(trio, count))
    logits = wanted(trio, processor, count, codes)[1]
    assert_as_exact(lambda: teacher_forced(model, prompt, codes.view(1, *GRID) if count else codes), logits)


@pytest.mark.parametrize("count", [0, 1, 2])
def test_hidden_states_and_logits_step_by_step(trio, processor, count):
    """Windows that end in the preview, cross into the image and lie in it, then single tokens."""
    model, images, codes = trio[0], sources(trio, count), coded(count)
    prompt, layout = model.encode_prompt(TEXT, images), model.layout(*GRID, images)

    def compute():
        state = model.start(prompt, None, 1, layout, 1, guided=False)
        outs, position = [state.prefill], 0
        for step in (4, 5, 7, *[1] * (layout.length - 17)):
            places = torch.arange(position, position + step)[None]
            outs.append(model.step(state, codes[:, position : position + step], places))
            model.commit(state, torch.tensor([step]))
            position += step
        return torch.cat([out.hidden for out in outs], dim=1), torch.cat([out.logits for out in outs], dim=1)

    assert_as_exact(compute, [*wanted(trio, processor, count, codes)[:2]])


@pytest.mark.parametrize("method", [NextToken(), SJD(window=5)], ids=str)
@pytest.mark.parametrize("count", [0, 3, *(pytest.param(count, marks=pytest.mark.whole) for count in (1, 2))])
def test_greedy_tokens(trio, processor, method, count):
    prompt = trio[0].encode_prompt(TEXT, sources(trio, count))
    tokens = decided(lambda: api.sample(trio[0], prompt, method, temperature=0).tokens)
    assert tokens.flatten().tolist() == wanted(trio, processor, count)[2][0, lead(count) :].tolist()


def test_grids_of_previews():
    from transformers.models.glm_image.processing_glm_image import GlmImageProcessor

    for rows, cols in glm_image._GRIDS:
        shape = GlmImageProcessor._get_target_shape(None, rows * 32, cols * 32)
        assert (rows, cols, *preview_grid((rows, cols))) == shape
    assert preview_grid((36, 24)) == (19, 13)
