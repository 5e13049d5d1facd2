"""SimpleAR against transformers' Qwen2, live, on the same random weights: it is that model, and a way to generate with
it.

The official generation loop (generate_visual at https://github.com/wdrink/SimpleAR, commit d56b6e5) is written down
here in its own terms: two sequences with their own caches and positions, and guidance between logarithms of
probabilities over all words, of which we look at the image codes alone. (It is that between logits: what the two add
to all words of a position, the softmax takes away again.)
"""

import pytest
from comfyui_specar.model_loaders.detect import load_model
from safetensors.torch import load_file
from transformers import Qwen2Config, Qwen2ForCausalLM

from ..support.closeness import fp64
from ..support.reference import assert_same_image, assert_same_states
from ..support.tiny_simplear import GRID, config, tokenizer, write

PROMPT = "<|t2i|>A highly realistic image of a red cup<|soi|>"
NEGATIVE = (
    "<|t2i|>An image of aerial view, overexposed, low quality, deformation, a poor composition, bad hands, bad teeth, "
    "bad eyes, bad limbs, distortion<|soi|>"
)


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def pair(request, tmp_path_factory):
    """Our model, and the reference with the file's weights, in fp64."""
    folder = write(tmp_path_factory.mktemp("model"), tied=request.param, decoder=False)
    settings = config(tied=request.param)
    del settings["architectures"], settings["specar"]
    weights = load_file(folder / "model.safetensors")
    with fp64():
        reference = Qwen2ForCausalLM(Qwen2Config(**settings)).eval().requires_grad_(False)
        missing, unexpected = reference.load_state_dict(weights, strict=False)
        reference.tie_weights()
    assert not unexpected and missing == (["lm_head.weight"] if request.param else [])
    return load_model(folder), reference


def ids(text):
    return tokenizer().encode(text, add_special_tokens=False).ids


def test_hidden_states_and_logits_of_both_branches(pair):
    """Branches of different lengths, each with its own positions."""
    assert_same_states(*pair, "a red cup", [ids(PROMPT), ids(NEGATIVE)], GRID)


@pytest.mark.parametrize("negative", [None, "blurry"])
def test_greedy_guided_images(pair, negative):
    prompts = [ids(PROMPT), ids(f"<|t2i|>{negative}<|soi|>" if negative else NEGATIVE)]
    other = pair[0].encode_prompt(negative) if negative else None
    assert_same_image(*pair, "a red cup", prompts, GRID, cfg=6.0, negative=other)
