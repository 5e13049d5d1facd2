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
from comfyui_specar.tools.benchmarks import plain, sizes, speed, subjects
from comfyui_specar.tools.benchmarks.generate import counterpart, generate
from comfyui_specar.tools.benchmarks.gpu import subjects as gpu_subjects
from comfyui_specar.tools.benchmarks.passes import Sampler, Staged, Stretch, weights_read
from comfyui_specar.tools.benchmarks.runs import chosen, names_of_cases

CPU = torch.device("cpu")


def tiny(name):
    return gpu_subjects.tiny(sizes.SIZES[name])


@pytest.mark.parametrize("name", ["janus-pro-1b", "lumina-mgpt-7b", "emu3-8b", "llamagen-b"])
def test_counterparts_of_transformers_compute_what_ours_do(name):
    model = sizes.build(tiny(name), torch.float32, CPU)
    ids, backbone = torch.randint(0, 64, (2, 12)), model.backbone
    positions = SequencePositions(sizes.SIZES[name].theta)  # LlamaGen's own rotation is none of transformers'
    with torch.inference_mode():
        hidden = backbone(backbone.tok_embeddings(ids), positions.prompt(12, 8, CPU)._replace(halves=True))
        assert torch.allclose(counterpart(model)(ids).logits, backbone.logits(hidden), atol=1e-5)
    assert 2 < backbone.logits(hidden).std() < 4  # neither even distributions nor certain ones
    assert len(generate(counterpart(model), 2, 5, 3, model.defaults, "static")) == 3


def test_the_plain_loop_generates_what_our_next_token_does(monkeypatch):
    model = sizes.build(tiny("llamagen-b"), torch.float32, CPU)
    params = SamplingParams(cfg=3.0, temperature=0.0)
    prompt, drawn, draw = sizes.prompt(model), [], plain.draw
    monkeypatch.setattr(plain, "draw", lambda *given: drawn.append(draw(*given)) or drawn[-1])
    assert len(plain.plain_loop(model, prompt, params, model.layout(), 2, 0, 64)) == 64
    ours = api.sample(model, prompt, api.methods.NextToken(), cfg=3.0, temperature=0.0, top_k=0, batch_size=2)
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


def test_names_of_cases_are_ours_or_those_of_the_tables():
    known = names_of_cases()
    assert chosen(["TV budget 0.05", "sjd coupled w32", "SJD, coupled, window 16"], known) == [
        "TV-metered 0.05",
        "sjd coupled w32",
        "sjd coupled w16",
    ]
    with pytest.raises(SystemExit, match="no method TV budget 5; choose from: next_token; "):
        chosen(["sjd coupled w32", "TV budget 5"], known)


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
    """One tiny model with random weights, and one that stands for the bundled one, of whole images."""
    monkeypatch.setitem(sizes.SIZES, "tiny", tiny("llamagen-b"))

    def find_subject(name, cfg, device, dtype, tokens):
        found = subjects.subject("tiny", cfg, device, dtype, tokens)
        if name == "tiny":
            return found
        layout = TokenLayout.plain(3, 6)
        found.model.encode_prompt = lambda text: sizes.prompt(found.model)
        return replace(found, name=name, stretch=Stretch(layout, 0, layout.length), small=found.eagle)

    monkeypatch.setattr(speed, "subject", find_subject)
    monkeypatch.setattr(speed, "BATCHES", (1, 2))
    monkeypatch.setattr(speed, "BATCH_TOKENS", 6)
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
    options = "--models bundled tiny --methods next_token 'chain of 5' --tokens 16 --cfg 3 --repetitions 2 --prompts 2"
    report, printed = measured(monkeypatch, tmp_path / "speed.json", options)
    timed = [(name, seed, id(prompt)) for name, seed, prompt in asked if seed]
    prompts = list(dict.fromkeys(prompt for _, _, prompt in timed[:4]))
    assert timed[:8] == [
        (name, seed, prompt) for seed in (1, 2) for prompt in prompts for name in ("next_token", "chain of 5")
    ]
    assert len(prompts) == 2 and [model["prompts"] for model in report["models"]] == [2, 1]
    assert report["not_run"] == {} and report["machine"]["threads"] and report["versions"]["transformers"]
    bundled, random = report["models"]
    methods = ["next_token", "chain of 5"]
    baselines = ["generate, static cache", "generate, dynamic cache", "plain loop"]
    for model in (bundled, random):
        rows = {row["name"]: row for row in model["rows"]}
        assert list(rows) == methods + baselines
        assert rows["next_token"]["ms_over"]["next_token"] == 1
        for name, row in rows.items():
            assert 0 < row["pass_ms"]["min"] <= row["pass_ms"]["median"] and row["bytes"] > model["weights_read"]
            if name in methods:
                assert (name == "chain of 5") == (row["draft_passes"] > 0)
        assert rows["chain of 5"]["bytes"] > rows["next_token"]["bytes"]
        assert [b["pictures"] for b in model["batches"]] == [1, 2]
    assert random["rows"][0]["passes"] == 15 and bundled["rows"][0]["passes"] == 17
    assert random["rows"][1]["pictures_passes"] == bundled["rows"][1]["passes"] + 1
    assert printed.strip() in capsys.readouterr().out
    assert all(f"| {name} |" in printed for name in methods + baselines)


@pytest.mark.parametrize("storage", ["int8", "fp8"])
def test_narrow_weights_are_read_as_such(small_world, storage):
    wide, narrow = (subjects.subject(name, None, CPU, torch.float32, 16) for name in ("tiny", f"tiny:{storage}"))
    layers = [weights_read(case.model.backbone.layers) for case in (wide, narrow)]
    assert 0.25 < layers[1] / layers[0] < 0.4  # scales and norms are fp32
    assert narrow.baselines() == [] and narrow.sampler("next_token")(0).passes == 15


def test_what_cannot_run_or_fails_is_written_down_and_the_rest_goes_on(small_world, monkeypatch, tmp_path):
    monkeypatch.setattr("comfyui_specar.tools.benchmarks.passes.plain_loop", lambda *_: 1 / 0)
    options = "--models tiny --methods next_token --parts methods baselines --tokens 8 --repetitions 1"
    report, _ = measured(monkeypatch, tmp_path / "x.json", options)
    assert "ZeroDivisionError" in report["not_run"]["tiny: plain loop"]
    assert [row["name"] for row in report["models"][0]["rows"]][-1] == "generate, dynamic cache"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    report, printed = measured(monkeypatch, tmp_path / "gpu.json", "--device cuda")
    assert set(report["not_run"]) == {*speed.MODELS["cuda"]} and report["models"] == []
    assert "* llamagen-xl: not run (no CUDA GPU on this machine)" in printed
