"""The quality benchmark: what it draws, keeps and goes on with, what it measures, and that its check sees a bias."""

import json
from dataclasses import replace
from itertools import pairwise

import comfyui_specar as specar
import pytest
import torch
from comfyui_specar.samplers.contract import Output
from comfyui_specar.tools.benchmarks import (
    quality,
    quality_draw,
    quality_map,
    quality_reports,
    quality_sheet,
    quality_sources,
    quality_tables,
    resampling,
    results_tables,
)
from comfyui_specar.tools.benchmarks.feature_spaces import FOLDER, Spaces
from comfyui_specar.tools.benchmarks.quality_cases import (
    FLOOR,
    PROMPTS,
    Prompt,
    continuous_cases,
    discrete_cases,
    first_seed,
    prompts,
)
from comfyui_specar.tools.benchmarks.quality_draw import Drawn, draw, origin, read
from comfyui_specar.tools.benchmarks.quality_measure import Measurement, check, log_probs, right
from comfyui_specar.tools.benchmarks.quality_model import ModelUnderTest
from comfyui_specar.tools.benchmarks.runs import Case
from comfyui_specar.tools.training.classifier import LABELS

from ..support.closeness import fp64

WANTED = prompts(5)
PARAMETERS = {"cfg": 2.0, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
NEXT = Case("next_token", specar.methods.NextToken())
SJD = Case("sjd coupled w32", specar.methods.SJD())


@pytest.fixture(scope="module")
def model():
    return specar.load_model(specar.bundled())


@pytest.fixture
def file(tmp_path):
    return tmp_path / "images.safetensors"


def drawing(case, model, file, wanted, batch=2) -> Drawn:
    about = origin(case, model, specar.bundled() / "model.safetensors", PARAMETERS)
    return draw(case, model, wanted, batch, file, about, PARAMETERS)


def test_prompts_are_different_and_those_of_a_small_run_are_the_first():
    assert len(set(prompts(PROMPTS))) == PROMPTS and prompts(PROMPTS)[:5] == WANTED
    assert Prompt(5, 1, 4).text == "cat, noto, on an orange background"
    assert {len(part) for part in map(set, zip(*prompts(PROMPTS), strict=True))} == {40, 3, 12}
    for count in (0, PROMPTS + 1):
        with pytest.raises(ValueError, match=str(PROMPTS)):
            prompts(count)


def test_every_case_has_its_name_file_and_seeds(model, tmp_path):
    eagle, small = (specar.load_drafter(specar.bundled(f"default/{name}"), model) for name in ("eagle", "small"))
    continuous = specar.load_model(specar.bundled("continuous"))
    drafter = specar.load_drafter(specar.bundled("continuous/small"), continuous)
    request = model.request(model.encode_prompt(WANTED[0].text))
    for case in discrete_cases(eagle, small):
        case.method.check(request)
    for listed in (discrete_cases(eagle, small), continuous_cases(drafter)):
        assert listed[1].name == listed[0].name + FLOOR and listed[1].method == listed[0].method
        for of in (
            lambda case: case.name,
            lambda case: quality_draw.file_of(tmp_path, case),
            lambda case: first_seed(case.name),
        ):
            assert len({of(case) for case in listed}) == len(listed)
    seeds = sorted(first_seed(case.name) for case in discrete_cases(eagle, small))
    assert min(b - a for a, b in pairwise(seeds)) >= PROMPTS and seeds[0] >= 0 and seeds[-1] < 2**63


def test_a_run_that_was_stopped_goes_on(model, file, tmp_path, monkeypatch):
    whole = drawing(SJD, model, tmp_path / "whole.safetensors", WANTED)
    assert len(whole) == 5 and whole.content.shape == (5, 16, 16) and whole.content.dtype == torch.uint16
    assert (whole.passes < 200).all() and whole.tv_bound.eq(0).all()
    drawing(SJD, model, file, WANTED[:2])
    drawn, sample = [], specar.sample

    def counted(*given, **named) -> Output:
        drawn.append(named["batch_size"])
        if len(drawn) == 2:
            raise KeyboardInterrupt
        return sample(*given, **named)

    monkeypatch.setattr(specar, "sample", counted)
    with pytest.raises(KeyboardInterrupt):
        drawing(SJD, model, file, WANTED)
    drawing(SJD, model, file, WANTED)
    assert drawn == [2, 1, 1], "one batch, the stopped one, and the same one again"
    assert file.read_bytes() == (tmp_path / "whole.safetensors").read_bytes()
    assert drawing(SJD, model, file, WANTED) is not None and drawn == [2, 1, 1], "nothing is left to do"
    assert len(drawing(SJD, model, file, WANTED[:3])) == 3, "a smaller run has the first images"


def test_every_image_has_its_prompt_and_its_seed(model, file, monkeypatch):
    calls, sample = [], specar.sample

    def recorded(*given, **named) -> Output:
        calls.append((given, named))
        return sample(*given, **named)

    monkeypatch.setattr(specar, "sample", recorded)
    drawing(SJD, model, file, WANTED[:3])
    first = first_seed(SJD.name)
    assert [(named["seed"], named["batch_size"]) for _, named in calls] == [(first, 2), (first + 2, 1)]
    features = torch.cat([given[1][0][0] for given, _ in calls])
    for prompt, found in zip(WANTED, features, strict=False):
        assert torch.equal(model.encode_prompt(prompt.text)[0][0][0], found)


def test_images_of_another_origin_are_refused(model, file):
    drawing(NEXT, model, file, WANTED[:1])
    with pytest.raises(ValueError, match="--folder"):
        read(file, origin(NEXT, model, specar.bundled() / "model.safetensors", PARAMETERS | {"cfg": 3.0}))


@pytest.mark.parametrize("cfg", [1.0, 2.0])
def test_the_log_probability_is_that_of_the_sampler(model, cfg):
    with fp64():
        conditioning = quality_draw.conditioning(model, WANTED[:2])
        out = specar.sample(model, conditioning, SJD.method, seed=1, batch_size=2, **PARAMETERS | {"cfg": cfg})
        found = log_probs(model, WANTED[:2], out.tokens, cfg)
    wanted = out.trace.positions["p"].double().log().mean(1)
    assert found.tolist() == pytest.approx(wanted.tolist(), abs=2**-22)  # the trace has fp32


def test_what_an_image_shows():
    shown = torch.tensor(WANTED)
    shown[1, 0] += 1
    shown[2, 2] += 1
    assert {name: values.tolist() for name, values in right(shown, WANTED).items()} == {
        "subject": [1, 0, 1, 1, 1],
        "style": [1] * 5,
        "background": [1, 1, 0, 1, 1],
        "all": [1, 0, 0, 1, 1],
    }


def seen(count: int, shift: float = 0.0) -> dict[str, torch.Tensor]:
    shown = torch.tensor(prompts(count))
    shown[:, 1] = torch.where(torch.rand(count) < 0.1, (shown[:, 1] + 1) % 3, shown[:, 1])
    return {"own": torch.randn(count, 4) + shift, "shown": shown, "log_p": torch.randn(count).double() - 1}


def test_the_check_passes_what_is_exact_and_names_what_is_not():
    count = 60
    drawn = Drawn(
        torch.randint(16, (count, 2, 2)).to(torch.uint16),
        torch.full((count,), 7, dtype=torch.int32),
        torch.full((count,), torch.nan),
    )
    exact = [NEXT.name, NEXT.name + FLOOR, "a", "b"]
    found = {name: seen(count) for name in exact} | {"biased": seen(count, 1.0), "relaxed": seen(count, 1.0)}
    table = Measurement(prompts(count), found, {"own": torch.randn(count, 4)}, vocab=16)
    rows = [table.row(name, drawn, lossless=name != "relaxed") for name in found]
    assert check(rows, 0.01) == ["biased"]
    assert [row.get("inside") for row in rows] == [None, True, True, True, False, False]
    reference, floor = rows[0], rows[1]
    assert reference["p_values"] == {} and "reference" not in reference["distances"]["own"]
    assert set(floor["p_values"]) == {"kernel, own", "agreement", "log_p"} and floor["tv_bound_per_token"] is None
    low, high = floor["distances"]["own"]["reference"]["kernel"]["interval"]
    assert low < 0 < high
    assert reference["changes"] == {} and set(floor["changes"]) == {"agreement", "log_p"}
    assert floor["changes"]["log_p"]["value"] == pytest.approx(floor["log_p"]["value"] - reference["log_p"]["value"])
    assert floor["log_p"]["quantiles"]["0.5"] == pytest.approx(float(found[floor["name"]]["log_p"].median()), abs=0.1)
    assert 2.6 < floor["log_p"]["token_entropy"]["value"] <= 2.7726  # of 16 codes, as likely as each other


def a_report(**rows: float) -> dict:
    """Of cases a (the reference), b and c; each row with the p-value of its only test."""
    return quality_reports.rounded(
        {
            "alarm_rate": 0.01,
            "classifier": {"checksum": "1"},
            "models": [
                {
                    "name": "default",
                    "weights": {"model": 7},
                    "dtype": "bf16",
                    "images": 4,
                    "prompts": 5,
                    "settings": {"cfg": 2},
                    "reference": "a",
                    "spaces": ("own",),
                    "cases": {name: {"lossless": True, "n": (1, 2)} for name in "abc"},
                    "rows": [
                        {"name": name, "lossless": True, "p_values": {} if name == "a" else {"log_p": p}, "measured": p}
                        for name, p in rows.items()
                    ],
                }
            ],
        }
    )


def joined(earlier: dict, new: dict) -> dict:
    return quality_reports.merged(json.loads(json.dumps(earlier)), json.loads(json.dumps(new)))["models"][0]


def test_a_report_grows():
    first = quality_reports.merged(a_report(a=1, c=0.006), a_report(a=1, c=0.006))
    assert first["models"][0]["missing"] == ["b"] and first["models"][0]["outside"] == ["c"]
    found = joined(first, a_report(a=0.5, b=0.4))
    assert [(row["name"], row["measured"]) for row in found["rows"]] == [("a", 0.5), ("b", 0.4), ("c", 0.006)]
    assert found["missing"] == [] and found["outside"] == [], "of two tests, 0.006 is no alarm"
    assert joined({**first, "models": [found]}, a_report(a=1, b=0.001))["outside"] == ["b", "c"], "Holm's next step"


def test_a_report_keeps_its_other_models():
    other = a_report(a=1)
    other["models"][0]["name"] = "continuous"
    assert [model["name"] for model in quality_reports.merged(a_report(a=1), other)["models"]] == [
        "default",
        "continuous",
    ]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("weights", {"model": 8}),
        ("dtype", "fp32"),
        ("images", 5),
        ("prompts", 6),
        ("settings", {"cfg": 3.0}),
        ("spaces", ["own", "x"]),
    ],
)
def test_rows_under_other_conditions_do_not_join(key, value):
    new = a_report(a=1, b=0.5)
    new["models"][0][key] = value
    with pytest.raises(ValueError, match=f"default, {key}.*--out"):
        joined(a_report(a=1, c=0.5), new)


def test_rows_of_another_classifier_or_setting_do_not_join():
    new = a_report(a=1, b=0.5)
    with pytest.raises(ValueError, match="classifier"):
        joined(a_report(a=1), new | {"classifier": {"checksum": "2"}})
    new["models"][0]["cases"]["c"]["n"] = [1, 3]
    with pytest.raises(ValueError, match="settings of 'c'"):
        joined(a_report(a=1, c=0.5), new)
    assert joined(a_report(a=1), new)["missing"] == ["c"], "no row depends on that setting"
    new["models"][0]["rows"].append({"name": "c", "lossless": True, "p_values": {"log_p": 0.3}})
    assert joined(a_report(a=1, c=0.5), new)["missing"] == [], "the row with that setting is replaced"


def test_sources_of_another_classifier_are_refused():
    spaces = Spaces(imagenet=False)
    found = quality_sources.read(spaces, 3)
    assert {name: values.shape for name, values in found.items()} == {"own": (3, 128), "shown": (3, 3)}
    spaces.checksum = "other"
    with pytest.raises(ValueError, match="another classifier"):
        quality_sources.read(spaces, 3)


def test_the_classifier_is_as_good_as_its_card_says():
    accuracy = Spaces(imagenet=False).accuracy
    assert all(share > 0.95 for share in accuracy["views"].values())
    card = (FOLDER / "README.md").read_text(encoding="utf-8")
    for share in accuracy["views"].values():
        assert f"{share:.2%}".replace("%", " %") in card


def test_a_small_run_of_the_command(monkeypatch, tmp_path, capsys):
    only = ["next_token", "next_token" + FLOOR, "sjd coupled w32", "Cool-SD delta 2"]
    monkeypatch.setattr(resampling, "REPEATS", 1999)
    out = tmp_path / "quality-cpu.json"
    run = [
        "quality",
        "--models",
        "default",
        "--images",
        "4",
        "--batch",
        "4",
        "--without-imagenet",
        "--dtype",
        "bfloat16",
        "--folder",
        str(tmp_path),
        "--out",
        str(out),
    ]

    def called(*more: str) -> dict:
        monkeypatch.setattr("sys.argv", [*run, *more])
        quality.main()
        return json.loads(out.read_text(encoding="utf-8"))["models"][0] if out.exists() else {}

    assert called("--parts", "draw", "--only", *only[:3]) == {}
    assert [row["name"] for row in called("--parts", "measure")["rows"]] == only[:3]
    called("--parts", "draw", "--only", only[3])
    for name in only[1:3]:
        next(tmp_path.glob(f"*/images/{quality_draw.file_of(tmp_path, Case(name, None)).name}")).unlink()
    report = called("--parts", "measure")
    rows = {row["name"]: row for row in report["rows"]}
    assert report["dtype"] == "torch.bfloat16" and set(report["weights"]) >= {"model.safetensors", "vq.safetensors"}
    assert list(rows) == only and report["outside"] == [] and report["images"] == 4
    assert all(set(row["measured"]) == {"machine", "versions", "commit"} for row in rows.values())
    assert "EAGLE-2" in report["missing"] and rows["next_token"]["passes"]["value"] == 256
    assert rows["Cool-SD delta 2"]["tv_bound_per_token"] > 0 and not rows["Cool-SD delta 2"]["lossless"]
    for row in rows.values():
        assert set(row["agreement"]) == {*LABELS, "all"} and -4 < row["log_p"]["value"] < 0
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
    table = quality_tables.distances("default", "own")
    assert len(table.splitlines()) == 2 + len(rows) + 2 and "Not measured yet: " in table

    monkeypatch.setattr("sys.argv", [*run, "--parts", "draw", "--only", "nonsense"])
    with pytest.raises(SystemExit):
        quality.main()
    assert "nonsense" in capsys.readouterr().err


def test_the_map_has_one_axis_at_a_time():
    found = quality_map.points(PARAMETERS)
    assert list(found)[0] == "guidance 2, temperature 1" and found["guidance 2, temperature 1"] == PARAMETERS
    assert found["top-k 100"] == PARAMETERS | {"top_k": 100} and found["guidance 5"] == PARAMETERS | {"cfg": 5.0}
    assert found["entropy temperature 2.5, 3, 0.6"] == PARAMETERS | {"entropy": (2.5, 3.0, 0.6)}
    own = found.pop("temperature 0.9, top-p 0.9")
    assert own == PARAMETERS | {"temperature": 0.9, "top_p": 0.9}, "the model's own"
    assert len(found) == 12
    assert all(sum(point[key] != PARAMETERS.get(key) for key in point) <= 1 for point in found.values())


def test_a_small_map(monkeypatch, tmp_path):
    points = ["guidance 2, temperature 1", "temperature 0.7", "entropy temperature 2.5, 3, 0.6"]
    out = tmp_path / "report.json"
    monkeypatch.setattr(resampling, "REPEATS", 1999)
    monkeypatch.setattr(
        "sys.argv",
        [
            "quality",
            "--map",
            "--images",
            "4",
            "--batch",
            "4",
            "--without-imagenet",
            "--folder",
            str(tmp_path),
            "--out",
            str(out),
            "--only",
            *points,
        ],
    )
    quality.main()
    [report] = json.loads(out.read_text(encoding="utf-8"))["models"]
    assert report["name"] == "default, sampling parameters" and len(report["missing"]) == 10
    base, cool, hot = report["rows"]
    assert [base["name"], cool["name"], hot["name"]] == points and report["reference"] == points[0]
    assert max(row["passes"]["value"] for row in report["rows"]) < 200, "those of SJD"
    change = {row["name"]: row["changes"]["log_p"]["value"] for row in (cool, hot)}
    assert change[points[1]] > 0.1 and change[points[2]] < -0.1, "the same yardstick for all"
    assert {file.parts[-3] for file in tmp_path.glob("*/images/*")} == {
        "default-2",
        "default-2-temperature-0.7",
        "default-2-entropy-2.5-3-0.6",
    }


def test_a_model_of_vectors_is_drawn_as_latents(tmp_path):
    folder, plain = specar.bundled("continuous"), Case("plain", specar.methods.ContinuousNextToken(4))
    model, vae = specar.load_model(folder), specar.load_image_decoder(folder)
    about = origin(plain, model, folder / "model.safetensors", {})
    drawn = draw(plain, model, WANTED[:2], 2, tmp_path / "x.safetensors", about, {})
    assert drawn.content.dtype == torch.float16 and drawn.passes.tolist() == [4, 4] and drawn.tv_bound.isnan().all()
    out = specar.sample(
        model, quality_draw.conditioning(model, WANTED[:2]), plain.method, seed=first_seed("plain"), batch_size=2
    )
    [images] = quality_draw.pixels(drawn, model, vae, 2)
    shown = vae.decode(out.latent).permute(0, 3, 1, 2) * 2 - 1
    assert images.shape == (2, 3, 256, 256) and (images - shown).abs().max() < 0.02  # fp16 of latents
    assert replace(drawn, passes=drawn.passes[:1]).first(1).content.shape[0] == 1


def test_the_sheet_shows_the_first_prompts_that_its_page_names(model, tmp_path):
    images = torch.linspace(-1, 1, 2 * 3 * 8 * 8).reshape(2, 3, 8, 8)
    drawn = quality_sheet.arranged([(("a method", "9 forward passes"), images), (("another",), images)])
    left = quality_sheet.LABEL + quality_sheet.SIDE + quality_sheet.GAP
    dark, bright = (
        drawn.crop((x, 0, x + quality_sheet.SIDE, quality_sheet.SIDE)).resize((1, 1)).getpixel((0, 0))
        for x in (quality_sheet.LABEL, left)
    )
    assert all(low < 128 < high for low, high in zip(dark, bright, strict=True)), "in their order"
    cases = [Case(name, SJD.method) for name in quality_sheet.CASES]
    tested = ModelUnderTest("default", model, None, cases, PARAMETERS, tmp_path)
    with pytest.raises(ValueError, match="There are no 8 images of 'next_token'"):
        quality_sheet.sheet(tested)
    page = (FOLDER.parents[2] / "docs/quality.md").read_text(encoding="utf-8")
    named = "; ".join(prompt.text for prompt in prompts(quality_sheet.COLUMNS))
    assert named in " ".join(page.split())
