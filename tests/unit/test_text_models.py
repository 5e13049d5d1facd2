"""Samplers on a language model that generates: forced row ends and endings, prompts of unequal length, shared key
heads.
"""

import itertools

import pytest
import torch
from comfyui_specar import api
from comfyui_specar.kernels.attention import attend
from comfyui_specar.kernels.logits import guide
from comfyui_specar.model_loaders.drafters import ModelDrafter
from comfyui_specar.models.backbone import Backbone, BackboneConfig
from comfyui_specar.models.positions import SequencePositions, rotation_of
from comfyui_specar.samplers.contract import Request, SamplingParams
from comfyui_specar.samplers.drafts.structures import Chain, Dynamic, Static
from comfyui_specar.samplers.methods.jacobi import INITIAL, REUSE, SJD, Jacobi
from comfyui_specar.samplers.methods.next_token import NextToken
from comfyui_specar.samplers.methods.skipping import Skipping
from comfyui_specar.samplers.methods.speculative import DraftTree
from comfyui_specar.samplers.probabilities import probabilities

from ..support.tiny import fill
from ..support.tiny_text import BEGIN, CODES, GRIDS, null, text_model
from ..support.toy import chi_square

PROMPTS = {"short": [36, BEGIN], "long": [35, 37, 36, 39, 34, 38, 2, BEGIN]}  # the model's own has 4 words


@pytest.fixture(scope="module")
def model():
    return text_model()


def keeping(layout, batch=1):
    """The layout with the second and the last token of the image kept."""
    keep = torch.zeros((batch, layout.rows, layout.cols), dtype=torch.bool)
    keep.flatten(1)[:, [1, -1]] = True
    return layout.keeping(torch.full_like(keep, 7, dtype=torch.int64), keep)


def request(model, prompt="long", grid=GRIDS[2], kept=False, negative=None, cfg=3.0, batch=3, seed=0, **params):
    layout = keeping(model.layout(*grid)) if kept else model.layout(*grid)
    prompts = [name and model.encode_ids(PROMPTS[name]) for name in (prompt, negative)]
    params = SamplingParams(cfg=cfg, **({"top_k": 8} | params))
    return Request(model, prompts[0], layout, params, prompts[1], seed, batch)


# The backbone


@pytest.mark.parametrize("masked", [False, True])
def test_shared_key_heads_are_repeated_ones(masked):
    q, k, v = (fill(name, (2, heads, 5, 8)) for name, heads in (("q", 6), ("k", 2), ("v", 2)))
    mask = torch.ones(5, 5, dtype=torch.bool).tril().expand(2, 1, -1, -1).clone()
    if masked:
        mask[1, 0, 4, 1:3] = False
    scores = q @ k.repeat_interleave(3, 1).transpose(-1, -2) / 8**0.5
    wanted = scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v.repeat_interleave(3, 1)
    assert torch.allclose(attend(q, k, v, mask if masked else None), wanted, atol=1e-6)


@pytest.mark.parametrize("norms", [0, 1, 4])
def test_a_backbone_with_shared_heads_is_one_with_copies_of_them(norms):
    shared = text_model(head_norms=norms).backbone
    config = shared.config
    whole = Backbone(BackboneConfig(**(vars(config) | {"kv_heads": 0})))
    weights = shared.state_dict()
    for name in list(weights):
        if "wqkv" in name:
            q, k, v = weights[name].unflatten(0, (-1, config.head_dim)).split((4, 2, 2))
            weights[name] = torch.cat((q, *(x.repeat_interleave(2, 0) for x in (k, v)))).flatten(0, 1)
        if "k_norm" in name and norms > 1:
            weights[name] = weights[name].repeat_interleave(2, 0)
    whole.load_state_dict(weights)
    x = fill("x embedding", (2, 7, config.dim))
    rotation = rotation_of(SequencePositions(), 3, 4, (2, 2), config.head_dim, "cpu")
    assert torch.allclose(shared(x, rotation), whole(x, rotation), atol=1e-5)


def test_positions_are_counted_through_prompt_and_image():
    """Rotated scores depend on distances alone, and the first image token stands one after the prompt."""
    places = SequencePositions(100.0)
    whole = places.prompt(9, 8, "cpu")
    split = rotation_of(places, 4, 5, (2, 3), 8, "cpu")
    assert torch.allclose(whole.cos, split.cos) and torch.allclose(whole.sin, split.sin) and split.halves
    angle = torch.tensor(5.0) * 100.0 ** (-torch.tensor([0.0, 2, 4, 6]) / 8)
    assert torch.allclose(whole.cos[0, 5], angle.cos()) and torch.allclose(whole.sin[0, 5], angle.sin())
    x = torch.eye(8)[0].view(1, 1, 1, 8)
    ragged = places.image(torch.tensor([[1], [1]]), torch.tensor([3, 7]), (2, 2), 8)
    turned = ragged(x.expand(2, -1, -1, -1))
    assert torch.allclose(
        turned[:, 0, 0, [0, 4]],
        torch.tensor([[4.0, 8.0]]).T.cos() * torch.tensor([1.0, 0])
        + torch.tensor([[4.0, 8.0]]).T.sin() * torch.tensor([0, 1.0]),
    )


# One token at a time


def stepwise(model, conditioning, tokens, layout):
    """Logits [B, S, V+] as the decoding loop sees them: prompt, then token by token."""
    state = model.start(conditioning, None, len(tokens), layout, slack=1, guided=False)
    logits = [state.prefill.logits]
    for n in range(tokens.shape[1] - 1):
        logits.append(model.step(state, tokens[:, n : n + 1], torch.full((len(tokens), 1), n)).logits)
        model.commit(state, torch.ones(len(tokens), dtype=torch.int64))
    return torch.cat(logits, 1)


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("grid", GRIDS)
@torch.inference_mode()
def test_steps_are_teacher_forcing(model, grid, prompt):
    layout, conditioning = model.layout(*grid), model.encode_ids(PROMPTS[prompt])
    image = torch.arange(2 * grid[0] * grid[1]).view(2, *grid) * 5 % CODES
    tokens = layout.keeping(image, torch.ones_like(image, dtype=torch.bool)).forced
    assert tokens.shape[1] == grid[0] * (grid[1] + 1) + 2
    assert (tokens[:, grid[1] :: grid[1] + 1][:, : grid[0]] == CODES).all()
    assert tokens[:, -2:].tolist() == [[CODES + 1, CODES + 2]] * 2
    forced = model.teacher_forced(conditioning, image)
    assert torch.allclose(stepwise(model, conditioning, tokens, layout), forced, atol=1e-4)
    if grid == model.grid:
        assert torch.equal(model.teacher_forced(conditioning, tokens), forced)
    # The language model itself: one table for prompt and image, one causal pass.
    words = torch.tensor([PROMPTS[prompt]]).expand(2, -1)
    words = torch.cat((words, torch.tensor(model.word_ids)[tokens]), 1)
    x = model.prefix.embedding(words)
    hidden = model.backbone(x, model.positions.prompt(words.shape[1], 8, "cpu"))
    assert torch.allclose(model.backbone.logits(hidden[:, len(PROMPTS[prompt]) - 1 : -1]), forced, atol=1e-4)


@pytest.mark.parametrize("negative", [None, *PROMPTS])
@pytest.mark.parametrize("prompt", PROMPTS)
@torch.inference_mode()
def test_greedy_images_are_the_arg_maxima_of_both_branches(model, prompt, negative):
    """Also where the unconditional prompt, the model's own or another, is longer or shorter than the prompt."""
    asked = request(model, prompt, negative=negative, temperature=0, batch=2)
    tokens = NextToken().sample(asked).tokens
    own = null(torch.zeros(1, 1, 1), GRIDS[2]).flatten().long().tolist()
    second = model.encode_ids(PROMPTS[negative] if negative else own)
    image = asked.layout.to_grid(tokens)
    logits = torch.cat([model.teacher_forced(branch, image) for branch in (asked.conditioning, second)])
    wanted = probabilities(logits, asked.params, model.vocab, asked.layout.forced.expand(2, -1)).argmax(-1)
    assert torch.equal(tokens, wanted)
    if negative != prompt:
        assert not torch.allclose(guide(logits, 3.0), logits[:2])
    assert torch.equal(Jacobi(window=5).sample(asked).tokens, tokens)


# Every sampler


@pytest.fixture(scope="module")
def drafters(model):
    small = text_model(head_norms=0, kv_heads=1, qkv_bias=False, dim=16, layers=1)
    return {"small": ModelDrafter(small), "same model": ModelDrafter(model)}


TREES = {"chain": Chain(3), "blocks": Chain(4, "block"), "static": Static("eagle_25"), "dynamic": Dynamic(3, 4, 12)}
METHODS = (
    {"next": lambda d: NextToken()}
    | {f"sjd {reuse}": lambda d, r=reuse: SJD(window=5, reuse=r) for reuse in REUSE}
    | {name: lambda d, structure=tree: DraftTree(d["small"], structure) for name, tree in TREES.items()}
    | {
        "same model": lambda d: DraftTree(d["same model"], Chain(3)),
        "skipping": lambda d: DraftTree(d["small"], Dynamic(3, 4, 12), skipping=Skipping(interval=2, guard=1)),
    }
)


class Watched:
    """A model that compares its cache, after every commit, with one fresh pass over what was committed."""

    def __init__(self, model, asked):
        self.model, self.asked, self.checked = model, asked, 0

    def __getattr__(self, name):
        return getattr(self.model, name)

    def start(self, *prompt, slack, guided, into=None):
        state = self.model.start(*prompt, slack=slack, guided=guided, into=into)
        self.lines = torch.zeros((self.asked.batch, self.asked.layout.length + slack), dtype=torch.int64)
        self.counts = torch.zeros(self.asked.batch, dtype=torch.int64)
        self.fresh = lambda: self.model.start(*prompt, slack=slack, guided=guided)
        return state

    def step(self, state, tokens, positions, tree_mask=None, uncommitted=0):
        assert uncommitted == 0
        self.fed = tokens
        return self.model.step(state, tokens, positions, tree_mask)

    def commit(self, state, count, path=None):
        self.model.commit(state, count, path)
        kept = self.fed if path is None else self.fed.gather(1, path)
        for row, number in enumerate(count.tolist()):
            begin = int(self.counts[row])
            self.lines[row, begin : begin + number] = kept[row, :number]
        self.counts += count
        fresh = self.fresh()
        begun = fresh.cache.lengths.clone()
        positions = torch.arange(self.lines.shape[1]).expand(len(self.lines), -1)
        self.model.step(fresh, self.lines, positions)
        assert torch.equal(state.cache.lengths, begun + self.counts.repeat(state.branches))
        for row, length in enumerate(state.cache.lengths.tolist()):
            for buffer, wanted in ((state.cache.keys, fresh.cache.keys), (state.cache.values, fresh.cache.values)):
                assert torch.allclose(buffer[:, row, :, :length], wanted[:, row, :, :length], atol=1e-4)
        self.checked += 1


@pytest.mark.parametrize("method", METHODS)
@torch.inference_mode()
def test_caches_are_those_of_a_fresh_pass(model, drafters, method):
    """For prompts longer and shorter than the unconditional one, with tokens kept; what is forced is in place."""
    for prompt, grid in (("long", (4, 3)), ("short", (3, 2))):
        asked = request(model, prompt, grid, kept=True)
        watched = Watched(model, asked)
        watched.asked = asked = Request(**(vars(asked) | {"model": watched}))
        tokens = METHODS[method](drafters).sample(asked).tokens
        forced = asked.layout.forced.expand(3, -1)
        assert torch.equal(tokens[forced >= 0], forced[forced >= 0])
        assert (tokens[forced < 0] < CODES).all() and watched.checked > 1


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("initial", INITIAL)
@torch.inference_mode()
def test_gumbel_gives_the_next_token_image(model, initial, kept):
    for window, (prompt, negative, cfg) in zip(
        (4, 9, 14), (("long", None, 3.0), ("short", "long", 2.0), ("short", None, 1.0)), strict=True
    ):
        asked = request(model, prompt, kept=kept, negative=negative, cfg=cfg, seed=4)
        wanted = NextToken().sample(asked).tokens
        found = SJD(window=window, reuse="gumbel", initial=initial).sample(asked)
        assert torch.equal(found.tokens, wanted)


@torch.inference_mode()
def test_the_target_as_its_own_drafter_needs_few_passes(model):
    asked = request(model, cfg=3.0)
    trace = DraftTree(ModelDrafter(model), Chain(4)).sample(asked).trace
    assert set(trace.totals["passes_per_image"]) == {1 + -(-(asked.layout.length - 1) // 5)}


# The distribution


@pytest.fixture(scope="module")
def distribution():
    """A model of 3 codes, and the probability of all 81 images of 2 x 2 tokens under guidance."""
    model = text_model(codes=3, sharpness=0.4, dim=16, layers=1)
    model.grids = (model.grid,) = ((2, 2),)
    asked = Request(model, model.encode_ids(PROMPTS["long"]), model.layout(), SamplingParams(cfg=1.5), batch=4000)
    images = torch.tensor(list(itertools.product(range(3), repeat=4))).view(-1, 2, 2)
    own = model.encode_ids(null(torch.zeros(1, 1, 1), (2, 2)).flatten().long().tolist())
    logits = torch.cat([model.teacher_forced(branch, images) for branch in (asked.conditioning, own)])
    tokens = asked.layout.keeping(images, torch.ones_like(images, dtype=torch.bool)).forced
    p = probabilities(logits, asked.params, 3, asked.layout.forced.expand(81, -1))
    whole = p.gather(-1, tokens[..., None])[..., 0].double().prod(-1)
    assert whole.sum() == pytest.approx(1, abs=1e-5) and whole.max() < 0.3
    return asked, {tuple(line): float(mass) for line, mass in zip(tokens.tolist(), whole, strict=True)}


SMALL = {"dim": 16, "layers": 1, "head_norms": 0, "kv_heads": 4, "qkv_bias": False}


@pytest.mark.parametrize(
    "method",
    [NextToken(), SJD(window=4), DraftTree(ModelDrafter(text_model(codes=3, **SMALL)), Static(((0,), (1,), (0, 0))))],
    ids=lambda method: type(method).__name__,
)
@torch.inference_mode()
def test_images_follow_the_distribution_of_the_model(distribution, method):
    asked, wanted = distribution
    if isinstance(method, DraftTree):
        method.drafter.module.grids = (method.drafter.module.grid,) = ((2, 2),)
    assert chi_square(method.sample(asked).tokens, wanted).z < 4


@torch.inference_mode()
def test_another_distribution_is_noticed(distribution):
    """The same images under another guidance: the test above would have failed."""
    asked, wanted = distribution
    other = Request(**(vars(asked) | {"params": SamplingParams(cfg=1.0)}))
    assert chi_square(NextToken().sample(other).tokens, wanted).z > 6


# Sizes and lengths


def test_prompts_name_the_size_of_the_image(model):
    """A prompt that was encoded once generates every size, and tells the model which."""
    conditioning = model.encode_prompt("fox")
    for grid in GRIDS:
        assert model.read(conditioning, 1, "p", grid).features.flatten().tolist()[-3:] == [*map(float, grid), BEGIN]
        out = api.sample(model, conditioning, SJD(), layout=model.layout(*grid), seed=1)
        assert out.tokens.shape == (1, *grid) and out.latent.shape == (1, 4, *grid)
    assert model.read(model.encode_ids([3, 4]), 1, "p", GRIDS[2]).features.flatten().tolist() == [3, 4]


def test_illegal_sizes_and_lengths_are_named(model):
    with pytest.raises(ValueError, match=r"16 x 80 pixels \(1 x 5 tokens\).* 32 x 48, "):
        model.layout(5, 1)
    with pytest.raises(ValueError, match="prompt.* 47 tokens.* 18.* 64"):
        api.sample(model, model.encode_ids([1] * 47), layout=model.layout(4, 3))
    api.sample(model, model.encode_ids([1] * 46), NextToken(), layout=model.layout(4, 3))


@pytest.mark.parametrize(("guided", "negative"), [(False, None), (True, None), (True, "long")])
def test_memory_is_what_was_announced(model, guided, negative):
    asked = request(model, "short", negative=negative)
    state = model.start(asked.conditioning, asked.negative, 2, asked.layout, 7, guided)
    longest = max(len(PROMPTS["long"]) if negative else 0, 4 if guided else 0, len(PROMPTS["short"]))
    found = state.cache.keys.nbytes + state.cache.values.nbytes
    assert model.kv_bytes(2, asked.layout, 7, guided, longest) == found
