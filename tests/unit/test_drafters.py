"""Drafters: what they predict step by step is what one pass over the same pairs gives, in training and in use."""

import random
from dataclasses import replace

import pytest
import torch
from comfyui_specar.model_loaders.detect import bundled, load_drafter, load_image_decoder, load_model
from comfyui_specar.models.networks.positions import GridPositions
from comfyui_specar.tools.training import drafter as command_line
from comfyui_specar.tools.training import drafter_export
from comfyui_specar.tools.training.drafter_data import Example, Pool, from_folder, hidden_states, own_samples
from comfyui_specar.tools.training.drafter_training import EagleObjective, SmallObjective, guide, head, overlap, train
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor

from ..support.models import eagle_features
from ..support.tiny import CAPTION, VOCAB, caption_features, fill, llamagen, vq_weights, write_eagle, write_llamagen

IMAGE = torch.tensor([[(5 * i + 3 + 7 * b) % VOCAB for i in range(16)] for b in range(2)])
NEGATIVE = fill("negative caption embedding", (1, 4, CAPTION))


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return llamagen(tmp_path_factory.mktemp("target"), text=True)


def load_kind(kind: str, target, folder):
    """An EAGLE drafter used to a cropped or padded prompt, or the target once more as its own drafter."""
    if kind == "same model":
        return load_drafter(write_llamagen(folder / "model.safetensors", True), target)
    return load_drafter(write_eagle(folder, input_type=None, prompt=kind), target)


@pytest.fixture(scope="module", params=["cropped", "padded", "same model"])
def drafter(request, target, tmp_path_factory):
    return load_kind(request.param, target, tmp_path_factory.mktemp("drafter"))


class Session:
    """A target that has read the prompts and decided IMAGE, and a drafter that has only read the prompts."""

    def __init__(self, target, drafter, guided=True, negative=None):
        self.target, self.drafter, self.branches = target, drafter, 1 + guided
        self.prompts = [None if p is None else target.encode_features(p) for p in (caption_features(), negative)]
        layout = target.layout()
        start = (*self.prompts, 2, layout)
        state = target.start(*start, slack=16, guided=guided)
        out = target.step(state, IMAGE, torch.arange(16).expand(2, -1))
        self.hidden = torch.cat((state.prefill.hidden, out.hidden[:, :-1]), 1)  # one position before each token
        self.prefix = state.prefix_hidden
        self.state = drafter.start(state, *start, slack=8, guided=guided)

    def observe(self, begin: Tensor, width: int, count: Tensor):
        """``width`` tokens of either row from its own position ``begin`` [2] on, of which ``count`` [2] are decided."""
        positions = (begin[:, None] + torch.arange(width)).clamp(max=15)
        rows = positions.repeat(self.branches, 1)
        hidden = self.hidden.gather(1, rows[..., None].expand(-1, -1, self.hidden.shape[-1]))
        return self.drafter.observe(self.state, IMAGE.gather(1, positions), positions, hidden, count)

    def eagle_reference(self, row: int, decided: int, drafts: list[int]) -> Tensor:
        """The feature [D] after ``decided`` tokens of a row and some drafts, by full passes over all pairs."""
        prompt = self.prefix[row // 2][row % 2]
        if self.drafter.padded:
            prompt = self.drafter._padding(prompt[None], row >= 2 and self.prompts[1] is None)[0]
        hidden = torch.cat((prompt[:-1], self.hidden[row, :decided]))
        ids = torch.cat((torch.zeros(len(prompt) - 1, dtype=torch.int64), IMAGE[row % 2, :decided]))
        feature = eagle_features(self.drafter, hidden[None], ids[None], len(prompt) - 1)[0, -1]
        for draft in drafts:
            hidden, ids = torch.cat((hidden, feature[None])), torch.cat((ids, torch.tensor([draft])))
            feature = eagle_features(self.drafter, hidden[None], ids[None], len(prompt) - 1)[0, -1]
        return feature

    def model_reference(self, row: int, decided: int, drafts: list[int]) -> Tensor:
        """The target's logits [V] after the same tokens."""
        tokens = torch.cat((IMAGE[row % 2, :decided], torch.tensor(drafts, dtype=torch.int64)))
        prefix = self.target.prefix(self.target.unpack_prompt(self.prompts[0], 1, "positive").features)
        if row >= 2:
            negative = self.prompts[1]
            prefix = (
                self.target.prefix.unconditional(prefix, self.target.grid)
                if negative is None
                else self.target.prefix(self.target.unpack_prompt(negative, 1, "negative").features)
            )
        padded = torch.cat((tokens, torch.zeros(1, dtype=torch.int64)))  # the last token is never fed
        return self.target(prefix, padded[None])[0, -1]

    def matches(self, out, slot: int, decided: list[int], drafts: list[list[int]]) -> None:
        for row in range(2 * self.branches):
            behind = decided[row % 2], drafts[row % 2]
            if self.drafter.kind == "eagle":
                feature = self.eagle_reference(row, *behind)
                assert torch.allclose(out.hidden[row, slot], feature, atol=1e-4), row
                assert torch.allclose(out.logits[row, slot], self.target.backbone.logits(feature), atol=1e-3), row
            else:
                assert torch.allclose(out.logits[row, slot], self.model_reference(row, *behind), atol=1e-3), row


@pytest.mark.parametrize(("guided", "negative"), [(False, None), (True, None), (True, NEGATIVE)])
@torch.inference_mode()
def test_steps_and_trees_agree_with_one_pass(target, drafter, guided, negative):
    session = Session(target, drafter, guided, negative)
    none = [[], []]
    session.matches(session.observe(torch.tensor([0, 0]), 1, torch.tensor([1, 1])), 0, [1, 1], none)
    session.matches(session.observe(torch.tensor([1, 1]), 3, torch.tensor([3, 1])), 0, [4, 2], none)
    root = session.observe(torch.tensor([4, 2]), 2, torch.tensor([1, 2]))
    decided = [5, 4]
    session.matches(root, 0, decided, none)

    # Two levels of drafts: two children of the root, then three grandchildren that hang differently in either row.
    first = torch.tensor([[7, 11], [2, 9]])
    place = torch.tensor(decided)[:, None]
    seen = torch.eye(2, dtype=torch.bool).expand(2, -1, -1)
    level = drafter.expand(session.state, first, place.expand(-1, 2), root.hidden.expand(-1, 2, -1), seen)
    for slot in range(2):
        session.matches(level, slot, decided, [[int(row[slot])] for row in first])
    second, parent = torch.tensor([[1, 30, 5], [5, 6, 8]]), torch.tensor([[0, 1, 1], [1, 0, 0]])
    own = torch.eye(3, dtype=torch.bool).expand(2, -1, -1)
    seen = torch.cat((torch.nn.functional.one_hot(parent, 2).bool(), own), -1)
    index = parent.repeat(session.branches, 1)[..., None].expand(-1, -1, level.hidden.shape[-1])
    leaves = drafter.expand(session.state, second, place.expand(-1, 3) + 1, level.hidden.gather(1, index), seen)
    for slot in range(3):
        paths = [[int(first[b, parent[b, slot]]), int(second[b, slot])] for b in range(2)]
        session.matches(leaves, slot, decided, paths)

    # What was drafted leaves no trace, and what was observed can be taken back.
    root = session.observe(torch.tensor(decided), 4, torch.tensor([2, 4]))
    session.matches(root, 0, [7, 8], none)
    alone = seen.new_ones(2, 1, 1)
    leaf = drafter.expand(session.state, first[:, :1], torch.tensor([[7], [8]]), root.hidden, alone)
    session.matches(leaf, 0, [7, 8], [[7], [2]])
    drafter.rewind(session.state, torch.tensor([3, 1]))
    leaf = drafter.expand(session.state, first[:, 1:], torch.tensor([[4], [7]]), root.hidden, alone)
    assert leaf.logits.isfinite().all(), "drafts start anew"
    session.matches(session.observe(torch.tensor([4, 7]), 5, torch.tensor([5, 1])), 0, [9, 8], none)


@torch.inference_mode()
def test_a_draft_runs_to_the_end_of_the_image(target, drafter):
    session = Session(target, drafter)
    root = session.observe(torch.tensor([0, 0]), 16, torch.tensor([13, 15]))
    session.matches(root, 0, [13, 15], [[], []])
    tokens, mask = torch.tensor([[4, 5, 6], [7, 8, 9]]), torch.ones(2, 1, 1, dtype=torch.bool)
    out = root
    for n in range(3):  # the second row drafts past the end, where only finite numbers are asked for
        out = drafter.expand(
            session.state,
            tokens[:, n : n + 1],
            torch.tensor([[13 + n], [15 + n]]),
            out.hidden,
            mask.expand(-1, -1, n + 1),
        )
        assert out.logits.isfinite().all()
    for row in (0, 2):
        if drafter.kind == "eagle":
            assert torch.allclose(out.hidden[row, 0], session.eagle_reference(row, 13, [4, 5, 6]), atol=1e-4)
        else:
            assert torch.allclose(out.logits[row, 0], session.model_reference(row, 13, [4, 5, 6]), atol=1e-3)


@torch.inference_mode()
def test_after_a_class_there_are_no_prompt_pairs(tmp_path):
    target = llamagen(tmp_path, text=False)
    eagle = load_kind("padded", target, tmp_path / "d")
    run = target.encode_prompt("3"), None, 2, target.layout(), 16, True
    state = target.start(*run)
    hidden = torch.cat((state.prefill.hidden, target.step(state, IMAGE, torch.arange(16).expand(2, -1)).hidden), 1)
    out = eagle.observe(
        eagle.start(state, *run), IMAGE[:, :4], torch.arange(4).expand(2, -1), hidden[:, :4], torch.tensor([4, 4])
    )
    wanted = eagle_features(eagle, hidden[:, :4], IMAGE[:, :4].repeat(2, 1))[:, -1:]
    assert torch.allclose(out.hidden, wanted, atol=1e-5)


def test_a_drafter_does_not_own_its_target_and_reports_its_memory(target, drafter):
    assert drafter.device == torch.device("cpu") and drafter.family == target.family
    assert not {id(p) for p in drafter.module.parameters()} & {id(p) for p in target.parameters()}
    run = target.encode_features(caption_features(120)), None, 2, target.layout(), 8, True
    state = drafter.start(target.start(*run), *run)
    cache = state.cache if drafter.kind == "eagle" else state.own.cache
    needed = cache.keys.nbytes + cache.values.nbytes
    assert drafter.kv_bytes(2, target.layout(), 8, True) == needed


# Training


@pytest.fixture(scope="module")
def pool(target):
    prompts = [caption_features(n)[0] for n in (7, 7, 3, 7, 3, 7)]
    return Pool.build(target, own_samples(target, prompts, rows=2))


def test_a_pool_keeps_prompts_tokens_and_hidden_states_together(target, pool):
    assert sorted(len(batch.tokens) for batch in pool.batches) == [2, 4]
    seen = 0
    for batch in pool.all(3):
        again = hidden_states(target, batch.features, batch.tokens)
        for hidden, wanted in zip(batch.hidden, again, strict=True):
            assert torch.allclose(hidden, wanted, atol=2e-2)
            assert hidden.shape == (len(batch.tokens), batch.features.shape[1] + 15, 64)
        seen += len(batch.tokens)
    assert seen == 6
    drawn = pool.sample(2, random.Random(0))
    assert len(drawn.tokens) == 2 and len(drawn.hidden[0]) == 2


@torch.inference_mode()
def test_training_sees_what_a_draft_will_see(target, tmp_path):
    """The objective's predictions at depth 1 .. 3 are those of observe and expand on the same tokens."""
    objective = EagleObjective(target, depth=3)
    with torch.no_grad():
        for name, parameter in objective.module.named_parameters():
            parameter.copy_(fill(f"drafter {name}", tuple(parameter.shape)).half())
    drafter_export.write_eagle(objective.module, target, tmp_path / "d")
    session = Session(target, load_drafter(tmp_path / "d", target))
    (batch,) = Pool.build(target, [Example(caption_features()[0], row) for row in IMAGE]).all(2)
    exact = tuple(torch.cat(parts, 1) for parts in zip(session.prefix, session.hidden[:, 1:].split(2), strict=True))
    batch = replace(batch, hidden=exact)
    predicted = objective.features(objective.module, batch, depth=3)
    out = session.observe(torch.tensor([0, 0]), 5, torch.tensor([5, 5]))
    for depth in range(3):
        assert torch.allclose(out.hidden[:, 0], predicted[depth][:, 4 + depth], atol=1e-4), depth
        place = torch.full((2, 1), 5 + depth)
        out = session.drafter.expand(
            session.state, IMAGE.gather(1, place), place, out.hidden, torch.ones(2, 1, depth + 1, dtype=torch.bool)
        )


@pytest.mark.parametrize("kind", ["eagle", "small"])
def test_training_learns_resumes_and_exports(target, pool, tmp_path, kind, steady_clock, monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(target, "positions", GridPositions(prompt_keys=kind == "small"))
    make = lambda: EagleObjective(target, 2) if kind == "eagle" else SmallObjective(target, 32, 1)  # noqa: E731
    objective = make()
    before = overlap(objective, objective.module, pool, 1.0)
    module = train(objective, pool, pool, tmp_path / "x.pt", minutes=80 * 0.02 / 60, batch=4)
    after = overlap(objective, module, pool, 1.0)
    assert after > before + 0.02
    steps = torch.load(tmp_path / "x.pt", weights_only=True)["counters"]["step"]
    module = train(make(), pool, pool, tmp_path / "x.pt", minutes=100 * 0.02 / 60, batch=4)
    assert torch.load(tmp_path / "x.pt", weights_only=True)["counters"]["step"] > steps
    assert overlap(objective, module, pool, 1.0) > before + 0.02, "the weights were resumed too"

    if kind == "eagle":
        drafter_export.write_eagle(module, target, tmp_path / "d")
    else:
        drafter_export.write_small(module, tmp_path / "d")
        small = load_model(tmp_path / "d")
        assert (small.grid, small.positions) == (target.grid, target.positions)
    drafter = load_drafter(tmp_path / "d", target)
    assert drafter.kind == ("eagle" if kind == "eagle" else "model")
    trained = overlap(objective, module, pool, 2.0)
    assert overlap(objective, drafter.module, pool, 2.0) == pytest.approx(trained, abs=0.01)


def test_images_of_a_folder_with_their_prompts(tmp_path):
    """A class-conditional model, too: its prompt has one slot, so that no pair stands before the image."""
    target = llamagen(tmp_path, text=False)
    save_file(vq_weights(), str(tmp_path / "vq.safetensors"))
    decoder = load_image_decoder(tmp_path / "vq.safetensors")
    folder = tmp_path / "images"
    folder.mkdir()
    pixels = torch.rand(2, 8, 8, 3, generator=torch.Generator().manual_seed(0)).mul(255).byte()
    for name, image in zip(("a.png", "b.png"), pixels, strict=True):
        Image.fromarray(image.numpy()).save(folder / name)
    with pytest.raises(ValueError, match=r"image.*\.txt"):
        from_folder(target, decoder, folder)
    (folder / "b.txt").write_text("3\n", encoding="utf-8")
    (example,) = from_folder(target, decoder, folder)
    assert torch.equal(example.tokens, decoder.encode(pixels[1:] / 255.0).flatten())
    assert torch.equal(example.features, target.encode_prompt("3")[0][0][0])

    pool = Pool.build(target, [example])
    (batch,) = pool.all(1)
    for objective in (EagleObjective(target, 2), SmallObjective(target, 32, 1)):
        objective.loss(batch, 1.0).backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in objective.module.parameters())
        assert 0 < overlap(objective, objective.module, pool, 1.0) < 1


@pytest.mark.parametrize("kind", ["eagle", "small"])
def test_the_command_line_trains_a_drafter_for_a_model_of_ones_own(tmp_path, monkeypatch, kind):
    model, prompts = write_llamagen(tmp_path / "model.safetensors", False), tmp_path / "prompts.txt"
    prompts.write_text("3\n\n5\n", encoding="utf-8")
    command = ["drafter", "--kind", kind, "--model", str(model), "--out", str(tmp_path / "out")]
    sizes = "--samples 22 --minutes 0.005 --width 32 --layers 1".split()
    monkeypatch.setattr("sys.argv", [*command, "--prompts", str(prompts), *sizes])
    monkeypatch.setattr(torch, "set_flush_denormal", lambda on: True)  # would stay on for all later tests
    command_line.main()
    assert [
        sum(len(b.tokens) for b in Pool.load(tmp_path / "out" / f"{name}.pool").batches)
        for name in ("examples", "held_out")
    ] == [20, 2]
    assert load_drafter(tmp_path / "out", load_model(model)).kind == ("eagle" if kind == "eagle" else "model")

    for pool in tmp_path.glob("out/*.pool"):
        pool.unlink()
    monkeypatch.setattr("sys.argv", command)  # neither prompts nor images
    with pytest.raises(SystemExit, match="image decoder|--prompts"):
        command_line.main()


def test_the_bundled_drafters_guess_what_the_bundled_model_generates():
    """At most three quarters as many single drafts are refused as of one who guesses that a token follows the same
    distribution as the one before; and EAGLE's, where hidden states are paired with the tokens before theirs, more."""

    def size(name: str) -> int:
        return (bundled(name) / "model.safetensors").stat().st_size

    model = load_model(bundled("default"))
    prompts = [model.encode_prompt(f"{thing}, 3d, on a blue background")[0][0][0] for thing in ("cat", "car", "heart")]
    pool = Pool.build(model, own_samples(model, prompts))
    probs = torch.cat([guide(head(model, batch.states(0)), 2.0).softmax(-1) for batch in pool.all(16)])
    unchanged = 1 - torch.minimum(probs[:, 1:], probs[:, :-1]).sum(-1).mean()
    for name, objective in (("eagle", EagleObjective(model, 1)), ("small", SmallObjective(model, 64, 1))):
        drafter = load_drafter(bundled(f"default/{name}"), model)
        refused = 1 - overlap(objective, drafter.module, pool, 2.0)
        assert refused < 0.75 * unchanged and size(f"default/{name}") < size("default") / 2
        if name == "eagle":
            shifted = [replace(batch, tokens=batch.tokens.roll(1, 1)) for batch in pool.batches]
            assert not drafter.padded and 1 - overlap(objective, drafter.module, Pool(shifted), 2.0) > 1.2 * refused
