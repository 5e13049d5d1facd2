"""SimpleAR against transformers' Qwen2, live, on the same random weights: it is that model, and a way to generate with
it.

The official generation loop (generate_visual at https://github.com/wdrink/SimpleAR, commit d56b6e5) is written down
here in its own terms: two sequences with their own caches and positions, and guidance between logarithms of
probabilities over all words, of which we look at the image codes alone.
"""

import pytest
import torch
from comfyui_specar import api
from comfyui_specar.model_loaders.detect import load_model
from comfyui_specar.model_loaders.families import simplear
from comfyui_specar.model_loaders.files.checkpoint import Checkpoint
from comfyui_specar.samplers.methods.jacobi import SJD
from comfyui_specar.samplers.methods.next_token import NextToken
from safetensors.torch import load_file
from transformers import Qwen2Config, Qwen2ForCausalLM

from ..support.closeness import assert_as_exact, decided, fp64
from ..support.tiny_simplear import CODES, GRID, WORDS, config, tokenizer, write

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
    return torch.tensor([tokenizer().encode(text, add_special_tokens=False).ids])


@fp64()
def reference_pass(reference, words, codes):
    """Hidden states and image logits of the last prompt word and all codes but the last."""
    everything = torch.cat((words, codes[:, :-1] + WORDS), dim=1)
    hidden = reference.model(everything).last_hidden_state[:, words.shape[1] - 1 :]
    return hidden, reference.lm_head(hidden)[..., WORDS : WORDS + CODES]


CODED = torch.tensor([[(7 * i + 3) % CODES for i in range(GRID[0] * GRID[1])]])


def test_teacher_forced_logits(pair):
    model, reference = pair
    prompt = model.encode_prompt("a red cup")
    wanted = reference_pass(reference, ids(PROMPT), CODED)[1]
    assert_as_exact(lambda: model.teacher_forced(prompt, CODED.view(1, *GRID)), wanted)


def test_both_guidance_branches_step_by_step(pair):
    """Branches of different length, each with its own positions; 5 tokens in a chain, then one by one."""
    model, reference = pair
    prompt = model.encode_prompt("a red cup")

    def compute():
        state = model.start(prompt, None, 1, model.layout(), 1, guided=True)
        outs, position = [state.prefill], 0
        for count in (5, *[1] * (CODED.shape[1] - 6)):
            places = torch.arange(position, position + count)[None]
            outs.append(model.step(state, CODED[:, position : position + count], places))
            model.commit(state, torch.tensor([count]))
            position += count
        return torch.cat([out.hidden for out in outs], dim=1), torch.cat([out.logits for out in outs], dim=1)

    hidden, logits = zip(*(reference_pass(reference, ids(text), CODED) for text in (PROMPT, NEGATIVE)), strict=True)
    assert_as_exact(compute, [torch.cat(hidden), torch.cat(logits)])


@fp64()
@torch.inference_mode()
def greedy(reference, scale, negative):
    """The official loop without its dice."""
    words, others = ids(PROMPT), ids(negative)
    conditional, unconditional = reference(words, use_cache=True), reference(others, use_cache=True)
    drawn = []
    for _ in range(GRID[0] * GRID[1]):
        with_prompt, without = (out.logits[:, -1].log_softmax(-1) for out in (conditional, unconditional))
        scores = scale * (with_prompt - without) + without
        code = scores[:, WORDS : WORDS + CODES].argmax(-1)
        drawn.append(int(code))
        step = (code + WORDS)[:, None]
        conditional = reference(step, past_key_values=conditional.past_key_values, use_cache=True)
        unconditional = reference(step, past_key_values=unconditional.past_key_values, use_cache=True)
    return drawn


@pytest.mark.parametrize("method", [NextToken(), SJD(window=4)], ids=str)
@pytest.mark.parametrize("negative", [None, "blurry"])
def test_greedy_guided_tokens(pair, method, negative):
    model, reference = pair
    other = None if negative is None else model.encode_prompt(negative)
    prompt = model.encode_prompt("a red cup")
    tokens = decided(lambda: api.sample(model, prompt, method, negative=other, cfg=6.0, temperature=0).tokens)
    written = NEGATIVE if negative is None else f"<|t2i|>{negative}<|soi|>"
    assert tokens.flatten().tolist() == greedy(reference, 6.0, written)


def test_guiding_logits_is_guiding_probabilities():
    """What the two add to all words of a position, the softmax takes away again."""
    with_prompt, without = (torch.randn(5, 300, generator=torch.Generator().manual_seed(seed)) * 4 for seed in (1, 2))
    with fp64():
        raw = without + 6 * (with_prompt - without)
        logs = [logits.log_softmax(-1) for logits in (with_prompt, without)]
        official = logs[1] + 6 * (logs[0] - logs[1])
        for part in (slice(None), slice(WORDS, None)):  # over all words, and over the image codes alone
            torch.testing.assert_close(raw[:, part].softmax(-1), official[:, part].softmax(-1))


RELEASED = {  # hidden, intermediate, layers, heads, key heads, millions of parameters
    "0.5B": (896, 4864, 24, 14, 2, 551.1),
    "1.5B": (1536, 8960, 28, 12, 2, 1641.4),
}


@pytest.mark.parametrize("size", RELEASED)
def test_released_sizes_fit_without_a_tensor_left_over(size, monkeypatch, tmp_path):
    hidden, ffn, layers, heads, kv_heads, millions = RELEASED[size]
    with torch.device("meta"):
        reference = Qwen2ForCausalLM(
            Qwen2Config(
                vocab_size=215_672,
                hidden_size=hidden,
                intermediate_size=ffn,
                num_hidden_layers=layers,
                num_attention_heads=heads,
                num_key_value_heads=kv_heads,
                tie_word_embeddings=True,
            )
        )
    tensors = {name: tensor for name, tensor in reference.state_dict().items() if name != "lm_head.weight"}
    monkeypatch.setattr(torch, "isfinite", lambda tensor: torch.ones(()))  # nothing to look at on the meta device
    assert simplear.recognise(tensors)
    model = simplear.load(Checkpoint(tensors, {}, tmp_path / "x.safetensors"), torch.bfloat16, None, ())
    sizes = model.backbone.config
    assert (sizes.dim, sizes.ffn_dim, sizes.layers, sizes.heads, sizes.kv_heads) == RELEASED[size][:5]
    assert (model.vocab, model.prefix.words, model.grid) == (64_000, 151_672, (64, 64)) and sizes.qkv_bias
    ours, theirs = (sum(p.numel() for p in module.parameters()) / 1e6 for module in (model, reference))
    assert ours == theirs and abs(ours - millions) < 1
