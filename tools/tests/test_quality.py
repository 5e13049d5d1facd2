"""The quality benchmark: what it draws, keeps and goes on with, what it measures, and that its check sees a bias."""

import json
from itertools import pairwise

import comfyui_specar as specar
import pytest
import torch
from comfyui_specar.samplers.contract import Output
from comfyui_specar.tests.support.closeness import fp64
from comfyui_specar.tools.benchmarks import (
    quality,
    quality_reports,
    quality_sources,
    quality_tables,
    resampling,
    results_tables,
)
from comfyui_specar.tools.benchmarks.feature_spaces import FOLDER, Spaces
from comfyui_specar.tools.benchmarks.quality_cases import FLOOR, PROMPTS, Prompt, first_seed, prompts
from comfyui_specar.tools.benchmarks.quality_measure import Measurement, check, right
from comfyui_specar.tools.benchmarks.quality_model import Images, ModelUnderTest, conditioning, log_probs
from comfyui_specar.tools.benchmarks.runs import Case
from comfyui_specar.tools.training.classifier import labels_for, numbered
from comfyui_specar.tools.training.settings import BUNDLED, EMOJI, PORTRAITS

WANTED = prompts(5, EMOJI)
CLASSES = numbered(WANTED, labels_for(EMOJI))
NEXT = Case("next_token", specar.methods.NextToken())
SJD = Case("sjd coupled w32", specar.methods.SJD())


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    folder, cpu = tmp_path_factory.mktemp("images"), torch.device("cpu")
    return {name: ModelUnderTest.load(name, 2.0, cpu, torch.float32, folder) for name in BUNDLED}


@pytest.fixture
def tested(loaded, tmp_path) -> ModelUnderTest:
    """The discrete model, whose images are in an empty folder."""
    found = loaded["default"]
    return ModelUnderTest("default", found.model, found.decoder, found.cases, found.parameters, tmp_path)


@pytest.mark.parametrize(("setting", "names"), [(EMOJI, [40, 3, 12]), (PORTRAITS, [18, 5, 12])])
def test_prompts_are_different_and_those_of_a_small_run_are_the_first(setting, names):
    every = prompts(PROMPTS, setting)
    assert len(set(every)) == PROMPTS and prompts(5, setting) == every[:5]
    assert [len(set(part)) for part in zip(*every, strict=True)] == names
    for count in (0, PROMPTS + 1):
        with pytest.raises(ValueError, match=str(PROMPTS)):
            prompts(count, setting)


def test_prompts_say_what_there_is():
    assert Prompt("cat", "noto", "orange").text == "cat, noto, on an orange background"
    robots = {prompt.style for prompt in prompts(PROMPTS, PORTRAITS) if "robot" in prompt.subject}
    others = {prompt.style for prompt in prompts(PROMPTS, PORTRAITS) if "hair" in prompt.subject}
    assert robots == {"bottts"} and others == {"avataaars", "big-smile", "personas", "pixel-art"}
    assert not any(prompt.subject == "no hair" for prompt in prompts(PROMPTS, PORTRAITS))


def test_every_case_has_its_name_file_and_seeds(loaded):
    for tested in loaded.values():
        request = tested.model.request(tested.model.encode_prompt(WANTED[0].text))
        reference, floor, *_ = tested.cases
        assert floor.name == reference.name + FLOOR and floor.method == reference.method
        for case in tested.cases:
            case.method.check(request)
        for of in (lambda case: case.name, tested.file):
            assert len({of(case) for case in tested.cases}) == len(tested.cases)
        seeds = sorted(first_seed(case.name) for case in tested.cases)
        assert min(b - a for a, b in pairwise(seeds)) >= PROMPTS and seeds[0] >= 0 and seeds[-1] < 2**63


def test_every_image_has_its_prompt_and_its_seed_and_a_run_that_was_stopped_goes_on(tested, tmp_path, monkeypatch):
    tested.draw(SJD, WANTED[:3], 2)
    whole = tested.file(SJD).read_bytes()
    images = tested.images(SJD, 3)
    assert images.content.shape == (3, 16, 16) and images.content.dtype == torch.uint16
    assert (images.passes < 200).all() and images.drift_bound.eq(0).all()
    assert len(tested.images(SJD, 2)) == 2 and tested.images(SJD, 4) is None
    tested.file(SJD).unlink()
    calls, sample = [], specar.sample

    def stopped(*given, **named) -> Output:
        calls.append((named["seed"] - first_seed(SJD.name), given[1][0][0]))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return sample(*given, **named)

    monkeypatch.setattr(specar, "sample", stopped)
    with pytest.raises(KeyboardInterrupt):
        tested.draw(SJD, WANTED[:3], 2)
    for _ in range(2):
        tested.draw(SJD, WANTED[:3], 2)  # the second one has nothing left to do
    assert tested.file(SJD).read_bytes() == whole
    assert [(at, len(features)) for at, features in calls] == [(0, 2), (2, 1), (2, 1)]
    for prompt, found in zip(WANTED[:3], torch.cat([calls[i][1] for i in (0, 2)]), strict=True):
        assert torch.equal(tested.model.encode_prompt(prompt.text)[0][0][0], found)
    tested.parameters = tested.parameters | {"cfg": 3.0}
    with pytest.raises(ValueError, match="--folder"):
        tested.images(SJD, 1)


@pytest.mark.parametrize("cfg", [1.0, 2.0])
def test_the_log_probability_is_that_of_the_sampler(tested, cfg):
    with fp64():
        given = conditioning(tested.model, WANTED[:2])
        parameters = tested.parameters | {"cfg": cfg}
        out = specar.sample(tested.model, given, SJD.method, seed=1, batch_size=2, **parameters)
        found = log_probs(tested.model, WANTED[:2], out.tokens, cfg)
    wanted = out.trace.positions["p"].double().log().mean(1)
    assert found.tolist() == pytest.approx(wanted.tolist(), abs=2**-22)  # the trace has fp32


def test_what_an_image_shows():
    shown = CLASSES.clone()
    shown[1, 0] += 1
    shown[2, 2] += 1
    assert {name: values.tolist() for name, values in right(shown, CLASSES).items()} == {
        "subject": [1, 0, 1, 1, 1],
        "style": [1] * 5,
        "background": [1, 1, 0, 1, 1],
        "all": [1, 0, 0, 1, 1],
    }


def seen(count: int, shift: float = 0.0) -> dict[str, torch.Tensor]:
    shown = numbered(prompts(count, EMOJI), labels_for(EMOJI))
    shown[:, 1] = torch.where(torch.rand(count) < 0.1, (shown[:, 1] + 1) % 3, shown[:, 1])
    return {"own": torch.randn(count, 4) + shift, "shown": shown, "log_p": torch.randn(count).double() - 1}


def test_the_check_passes_what_is_exact_and_names_what_is_not():
    count = 60
    passes = torch.full((count,), 7, dtype=torch.int32)
    exact = [NEXT.name, NEXT.name + FLOOR, "a", "b"]
    found = {name: seen(count) for name in exact} | {"biased": seen(count, 1.0), "relaxed": seen(count, 1.0)}
    classes = numbered(prompts(count, EMOJI), labels_for(EMOJI))
    table = Measurement(classes, found, {"own": torch.randn(count, 4)})
    unknown = torch.full((count,), torch.nan)
    rows = [table.row(name, passes, unknown, lossless=name != "relaxed") for name in found]
    assert check(rows, 0.01) == ["biased"]
    assert [row.get("inside") for row in rows] == [None, True, True, True, False, False]
    reference, floor = rows[0], rows[1]
    assert reference["p_values"] == reference["changes"] == {} and "reference" not in reference["distances"]["own"]
    assert set(floor["p_values"]) == {"kernel, own", "agreement", "log_p"} and floor["drift_bound_per_token"] is None
    low, high = floor["distances"]["own"]["reference"]["kernel"]["interval"]
    assert low < 0 < high
    assert floor["changes"]["log_p"]["value"] == pytest.approx(floor["log_p"]["value"] - reference["log_p"]["value"])


def a_report(name: str = "default", **rows: float) -> dict:
    """Of cases a (the reference), b and c; each row with the p-value of its only test."""
    model = {
        "name": name,
        "weights": {"model": 7},
        "dtype": "bf16",
        "images": 4,
        "prompts": 5,
        "settings": {"cfg": 2},
        "reference": "a",
        "spaces": ("own",),
        "classifier": {"checksum": "1"},
        "cases": {case: {"lossless": True, "n": (1, 2)} for case in "abc"},
        "rows": [
            {"name": case, "lossless": True, "p_values": {} if case == "a" else {"log_p": p}, "measured": p}
            for case, p in rows.items()
        ],
    }
    return quality_reports.rounded({"alarm_rate": 0.01, "models": [model]})


def joined(earlier: dict, new: dict) -> dict:
    return quality_reports.merged(json.loads(json.dumps(earlier)), json.loads(json.dumps(new)))["models"][0]


def test_a_report_grows_and_keeps_its_other_models():
    first = quality_reports.merged(a_report(a=1, c=0.006), a_report(a=1, c=0.006))
    assert first["models"][0]["missing"] == ["b"] and first["models"][0]["outside"] == ["c"]
    found = joined(first, a_report(a=0.5, b=0.4))
    assert [(row["name"], row["measured"]) for row in found["rows"]] == [("a", 0.5), ("b", 0.4), ("c", 0.006)]
    assert found["missing"] == [] and found["outside"] == [], "of two tests, 0.006 is no alarm"
    assert joined({**first, "models": [found]}, a_report(a=1, b=0.001))["outside"] == ["b", "c"], "Holm's next step"
    both = quality_reports.merged(a_report(a=1), a_report("continuous", a=1))["models"]
    assert [model["name"] for model in both] == ["default", "continuous"]


def test_rows_under_other_conditions_do_not_join():
    others = {"weights": {"model": 8}, "dtype": "fp32", "images": 5, "prompts": 6, "settings": {"cfg": 3.0}}
    for key, value in (others | {"spaces": ["own", "x"], "classifier": {"checksum": "2"}}).items():
        new = a_report(a=1, b=0.5)
        new["models"][0][key] = value
        with pytest.raises(ValueError, match=f"default, {key}.*--out"):
            joined(a_report(a=1, c=0.5), new)
    new = a_report(a=1, b=0.5)
    new["models"][0]["cases"]["c"]["n"] = [1, 3]
    with pytest.raises(ValueError, match="settings of 'c'"):
        joined(a_report(a=1, c=0.5), new)
    assert joined(a_report(a=1), new)["missing"] == ["c"], "no row depends on that setting"
    new["models"][0]["rows"].append({"name": "c", "lossless": True, "p_values": {"log_p": 0.3}})
    assert joined(a_report(a=1, c=0.5), new)["missing"] == [], "the row with that setting is replaced"


def test_sources_of_another_classifier_are_refused_and_the_card_says_how_good_it_is():
    spaces = Spaces(EMOJI, imagenet=False)
    found = quality_sources.read(spaces, 3)
    assert {name: values.shape for name, values in found.items()} == {"own": (3, 128), "shown": (3, 3)}
    card = (FOLDER / "README.md").read_text(encoding="utf-8")
    for share in spaces.accuracy["views"].values():
        assert share > 0.95 and f"{share:.2%}".replace("%", " %") in card
    spaces.checksum = "other"
    with pytest.raises(ValueError, match="another classifier"):
        quality_sources.read(spaces, 3)


def test_a_small_run_of_the_command(monkeypatch, tmp_path, capsys):
    only = ["next_token", "next_token" + FLOOR, "sjd coupled w32", "Cool-SD delta 2"]
    monkeypatch.setattr(resampling, "REPEATS", 1999)
    out = tmp_path / "quality-cpu.json"
    run = ["quality", "--models", "default", "--images", "4", "--batch", "4", "--without-imagenet"]
    run += ["--dtype", "bfloat16", "--folder", str(tmp_path), "--out", str(out)]

    def called(*more: str) -> dict:
        monkeypatch.setattr("sys.argv", [*run, *more])
        quality.main()
        return json.loads(out.read_text(encoding="utf-8"))["models"][0] if out.exists() else {}

    assert called("--parts", "draw", "--only", *only[:3]) == {}
    assert [row["name"] for row in called("--parts", "measure")["rows"]] == only[:3]
    called("--parts", "draw", "--only", only[3])
    (tmp_path / "default-2/images/sjd-coupled-w32.safetensors").unlink()
    report = called("--parts", "measure")
    rows = {row["name"]: row for row in report["rows"]}
    assert report["dtype"] == "torch.bfloat16" and set(report["weights"]) >= {"model.safetensors", "vq.safetensors"}
    assert list(rows) == only and report["outside"] == [] and report["images"] == 4
    assert all(set(row["measured"]) == {"command", "machine", "versions", "commit"} for row in rows.values())
    assert "EAGLE-2" in report["missing"] and rows["next_token"]["passes"]["value"] == 256
    assert rows["Cool-SD delta 2"]["drift_bound_per_token"] > 0 and not rows["Cool-SD delta 2"]["lossless"]
    for row in rows.values():
        assert set(row["agreement"]) == {"subject", "style", "background", "all"} and -4 < row["log_p"]["value"] < 0
        assert row["agreement"]["background"]["value"] >= 0.75, "the model nearly always draws the background"
    looked = {file: file.stat().st_mtime_ns for file in tmp_path.glob("*/seen/*")}
    called("--parts", "measure")
    assert looked and all(file.stat().st_mtime_ns == then for file, then in looked.items()), "read again"

    with pytest.raises(ValueError, match="default, images"):
        called("--parts", "measure", "--images", "3")
    assert json.loads(out.read_text(encoding="utf-8"))["models"] == [report], "nothing was measured, nor written"

    monkeypatch.setattr(results_tables, "RESULTS", tmp_path)
    table = quality_tables.quality("default")
    assert len(table.splitlines()) == 2 + len(rows) + 1 + 2 and "4 images of each, bfloat16." in table
    assert "| SJD, coupled, window 32 | " in table and "| next token, other seeds | 256 | exact |" in table

    with pytest.raises(SystemExit):
        called("--parts", "draw", "--only", "nonsense")
    assert "nonsense" in capsys.readouterr().err


def test_a_model_of_vectors_is_drawn_as_latents(loaded):
    tested, plain = loaded["continuous"], Case("plain", specar.methods.ContinuousNextToken(4))
    tested.draw(plain, WANTED[:2], 2)
    images = tested.images(plain, 2)
    assert images.content.dtype == torch.float16 and images.passes.tolist() == [4, 4]
    assert images.drift_bound.isnan().all()
    given = conditioning(tested.model, WANTED[:2])
    out = specar.sample(tested.model, given, plain.method, seed=first_seed("plain"), batch_size=2)
    [pixels] = tested.pixels(images)
    shown = tested.decoder.decode(out.latent).permute(0, 3, 1, 2) * 2 - 1
    assert pixels.shape == (2, 3, 256, 256) and (pixels - shown).abs().max() < 0.02  # fp16 of latents
    assert len(images + Images.of(out, continuous=True)) == 4
