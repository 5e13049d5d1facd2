"""The speed benchmark, with tiny models: what it compares is the same thing, and what it reports is complete."""

import json
import shlex
from dataclasses import replace

import pytest
import torch
from comfyui_specar import api
from comfyui_specar.models.networks.positions import SequencePositions
from comfyui_specar.samplers.contract import SamplingParams
from comfyui_specar.samplers.layout import TokenLayout
from comfyui_specar.tools.benchmarks import plain, sizes, speed
from comfyui_specar.tools.benchmarks.generate import counterpart, generate
from comfyui_specar.tools.benchmarks.gpu import subjects as gpu_subjects
from comfyui_specar.tools.benchmarks.passes import Sampler, Staged, Stretch, weights_read

CPU = torch.device("cpu")


def tiny(name):
    return gpu_subjects.tiny(sizes.SIZES[name])


def test_the_counterpart_of_transformers_computes_what_ours_does():
    model = sizes.build(tiny("llamagen-b"), torch.float32, CPU)
    ids, backbone = torch.randint(0, 64, (2, 12)), model.backbone
    with torch.inference_mode():  # LlamaGen's own rotation is none of transformers'
        rotation = SequencePositions(10000.0).prompt(12, 8, CPU)._replace(halves=True)
        hidden = backbone(backbone.tok_embeddings(ids), rotation)
        assert torch.allclose(counterpart(model)(ids).logits, backbone.logits(hidden), atol=1e-5)
    assert len(generate(counterpart(model), 2, 5, 3, model.defaults, "static")) == 3


@pytest.mark.parametrize("name", ["janus-pro-1b", "lumina-mgpt-7b", "emu3-8b", "llamagen-b"])
def test_random_weights_give_neither_even_distributions_nor_certain_ones(name):
    backbone = sizes.build(tiny(name), torch.float32, CPU).backbone
    with torch.inference_mode():
        logits = backbone.logits(backbone.norm(torch.randn(2, 12, backbone.config.dim)))
    assert 2 < logits.std() < 4


def test_the_plain_loop_generates_what_our_next_token_does(monkeypatch):
    model = sizes.build(tiny("llamagen-b"), torch.float32, CPU)
    params = SamplingParams(cfg=3.0, temperature=0.0)
    prompt, drawn, draw = sizes.prompt(model), [], plain.draw
    monkeypatch.setattr(plain, "draw", lambda *given: drawn.append(draw(*given)) or drawn[-1])
    assert len(plain.plain_loop(model, prompt, params, model.layout())) == 64
    ours = api.sample(model, prompt, api.methods.NextToken(), cfg=3.0, temperature=0.0, top_k=0)
    assert torch.equal(torch.cat(drawn, dim=1), ours.tokens.flatten(1))


def test_plain_loop_filters():
    logits = torch.tensor([[0.5, 0.2, 0.15, 0.1, 0.05]]).log()
    for params, legal in (
        (SamplingParams(top_k=2), {0, 1}),
        (SamplingParams(top_p=0.69), {0, 1}),
        (SamplingParams(top_p=0.71), {0, 1, 2}),
        (SamplingParams(), {0, 1, 2, 3, 4}),
    ):
        torch.manual_seed(0)
        assert {int(plain.draw(logits, params)) for _ in range(200)} == legal


def test_a_stretch_is_generated_after_the_tokens_before_it():
    model = sizes.build(tiny("llamagen-b"), torch.float32, CPU)
    stretch = Stretch.middle(TokenLayout.plain(8, 8), 20)
    assert (stretch.behind, stretch.tokens, stretch.drawn.length) == (22, 20, 20)
    staged = Staged(model, stretch)
    seen, start = [], model.start
    model.start = lambda *given, **named: seen.append(start(*given, **named)) or seen[-1]
    out = api.sample(staged, sizes.prompt(model), api.methods.NextToken(), layout=stretch.drawn)
    assert out.tokens.shape == (1, 1, 20)
    assert seen[0].cache.lengths.tolist() == [sizes.PROMPT + 22 + 19] * 2


@pytest.fixture
def small_world(monkeypatch):
    """A tiny model stands for the bundled one."""

    def find_subject(name, cfg, device, dtype):
        found = gpu_subjects.random_subject("llamagen-b", True, 0)
        found.model.encode_prompt = lambda text: sizes.prompt(found.model)
        layout = TokenLayout.plain(3, 6)
        stretch, params = Stretch(layout, 0, layout.length), replace(found.params, cfg=cfg)
        return replace(found, name=name, params=params, stretch=stretch, small=found.eagle)

    monkeypatch.setattr(speed, "subject", find_subject)
    monkeypatch.setattr(speed, "BATCHES", (1, 2))
    monkeypatch.setattr(speed, "CURVES", ("next_token",))


def measured(monkeypatch, out, options: str) -> tuple[dict, str]:
    """The report that the command writes, and its table."""
    monkeypatch.setattr("sys.argv", ["speed", *shlex.split(options), "--out", str(out)])
    speed.main()
    return json.loads(out.read_text(encoding="utf-8")), out.with_suffix(".md").read_text(encoding="utf-8")


def test_a_report_is_complete_and_prompts_take_turns(small_world, monkeypatch, tmp_path, capsys):
    asked, output = [], Sampler.output
    monkeypatch.setattr(
        Sampler,
        "output",
        lambda self, seed, *rest: asked.append((self.name, seed, self.conditioning)) or output(self, seed, *rest),
    )
    options = "--models tiny --methods next_token 'chain of 5' --cfg 3 --repetitions 2 --prompts 2"
    report, printed = measured(monkeypatch, tmp_path / "speed.json", options)
    timed = [(name, seed, id(prompt)) for name, seed, prompt in asked if seed]
    prompts = list(dict.fromkeys(prompt for _, _, prompt in timed[:4]))
    assert timed[:8] == [
        (name, seed, prompt) for seed in (1, 2) for prompt in prompts for name in ("next_token", "chain of 5")
    ]
    [model] = report["models"]
    assert len(prompts) == model["prompts"] == 2
    assert report["not_run"] == {} and report["machine"]["threads"] and report["versions"]["transformers"]
    baselines = ["generate, static cache", "generate, dynamic cache", "plain loop"]
    rows = {row["name"]: row for row in model["rows"]}
    plain_row, chain = rows["next_token"], rows["chain of 5"]
    assert list(rows) == ["next_token", "chain of 5", *baselines]
    assert plain_row["ms_over"]["next_token"] == 1 and plain_row["passes"] == 17 == plain_row["pictures_passes"] - 1
    for row in rows.values():
        assert 0 < row["pass_ms"]["min"] <= row["pass_ms"]["median"] and row["bytes"] > model["weights_read"]
    assert chain["bytes"] > plain_row["bytes"] and chain["draft_passes"] > 0 == plain_row["draft_passes"]
    assert [point["pictures"] for point in model["batches"]] == [1, 2]
    assert printed.strip() in capsys.readouterr().out
    assert all(f"| {name} |" in printed for name in rows)


@pytest.mark.parametrize("storage", ["int8", "fp8"])
def test_narrow_weights_are_read_as_such(storage):
    wide, narrow = (gpu_subjects.random_subject(name, True, 0) for name in ("llamagen-b", f"llamagen-b:{storage}"))
    layers = [weights_read(case.model.backbone.layers) for case in (wide, narrow)]
    assert 0.25 < layers[1] / layers[0] < 0.4  # scales and norms are fp32
    assert narrow.sampler("next_token")(0).passes == gpu_subjects.DRY_TOKENS - 1


def test_what_cannot_run_or_fails_is_written_down_and_the_rest_goes_on(small_world, monkeypatch, tmp_path):
    monkeypatch.setattr("comfyui_specar.tools.benchmarks.passes.plain_loop", lambda *_: 1 / 0)
    options = "--models tiny --methods next_token --parts methods baselines --repetitions 1"
    report, printed = measured(monkeypatch, tmp_path / "x.json", options)
    assert "ZeroDivisionError" in report["not_run"]["tiny: plain loop"] and "* tiny: plain loop: not run" in printed
    assert [row["name"] for row in report["models"][0]["rows"]][-1] == "generate, dynamic cache"
