"""What documents make of a quality report: of none, of one with some cases, and the chart."""

import json
import xml.etree.ElementTree as ElementTree

import pytest
from comfyui_specar.reports import quality as reports_quality
from comfyui_specar.reports.quality import quality_of
from comfyui_specar.tests.support import quality_report
from comfyui_specar.tools.benchmarks import charts, documents, quality_tables, results_tables
from comfyui_specar.tools.benchmarks.charts import Point, front, quality_chart
from comfyui_specar.tools.benchmarks.quality_cases import discrete_cases

EXACT, RELAXED = {"lossless": True}, {"lossless": False}
CASES = {
    "next_token": EXACT,
    "next_token, other seeds": EXACT,
    "sjd coupled w32": EXACT,
    "EAGLE-2": EXACT,
    "LANTERN delta 0.3": RELAXED,
    "Cool-SD delta 2, as published": RELAXED,
    "VVS every 4th, EAGLE-1": RELAXED,
}


@pytest.fixture
def results(monkeypatch, tmp_path):
    """An empty folder for a quality report, beside the other results."""
    for file in results_tables.RESULTS.glob("*.json"):
        if file.stem != quality_tables.REPORT:
            (tmp_path / file.name).write_bytes(file.read_bytes())
    monkeypatch.setattr(results_tables, "RESULTS", tmp_path)
    return tmp_path


def write(results, *models) -> None:
    file = results / f"{quality_tables.REPORT}.json"
    file.write_text(json.dumps(quality_report.report(*models)), encoding="utf-8")


def test_without_a_report_there_are_no_numbers(results):
    for name, table in documents.TABLES.items():
        if name.startswith(("quality, d", "quality, c", "distances", "quality chart")):
            assert "ot measured yet" in table() or "尚未测量" in table(), name
    assert documents.chart_of_quality() is None and not documents.generated()
    assert "ours" not in quality_tables.papers().splitlines()[0]


def test_a_report_with_some_cases_and_one_model(results):
    write(results, quality_report.model("default", CASES, measured=5))
    assert all(table() for table in documents.TABLES.values())
    table = quality_tables.quality("default")
    assert "Not measured yet: Cool-SD delta 2, reconstructed; VVS every 4th, EAGLE-1." in table
    assert "| LANTERN k 1000, delta 0.3 | " in table and "\n| source images |  |  |  | 97.0 ± 1.0 |" in table
    assert quality_tables.distances("continuous", "own") == quality_tables.NONE
    rows = documents.quality_of_methods().splitlines()
    [measured] = [line for line in rows if line.startswith("| [LANTERN, k 1000, delta 0.3]")]
    row = quality_tables.measured("default")["LANTERN delta 0.3"]
    assert measured.endswith(
        f"| {row['changes']['log_p']['value']:+.2f} ± 0.03 | {100 * row['agreement']['all']['value']:.0f} ± 2 % |"
    )
    assert not any("Cool-SD" in line for line in rows), "not measured yet"
    assert "pictures/quality.svg" in documents.TABLES["quality chart"]()
    assert "| 0 | 95 ± 2 % |" in rows[2], "next token has no change from itself"


def test_what_find_fastest_shows_is_of_settings_with_the_same_drafts_and_rule(results, monkeypatch):
    """Of the first such setting: sizes of windows and trees, and the drafter, do not matter."""

    def window(size: int, **more) -> dict:
        return {"method": "sjd", "window": size, "reuse": "coupled", "rule": {"rule": "exact"}, "lossless": True} | more

    def tree(kind: str, drafter: str = "eagle") -> dict:
        rule = {"rule": "cool_sd", "delta": 2.0}
        return {"method": "cool_sd", "drafter": drafter, "structure": {"kind": kind}, "rule": rule, "lossless": False}

    file = results / "shipped.json"
    monkeypatch.setattr(reports_quality, "FILE", file)
    assert quality_of(window(32)) is None
    cases = {
        "next_token": {"method": "next_token", "lossless": True},
        "window": window(32),
        "tree": tree("static"),
        "other": tree("static", "model"),
        "settling": window(32, settle=0.05, lossless=False),
    }
    write(results, quality_report.model("default", cases))
    assert quality_of(window(32)) is None, "the table is not written yet"
    file.write_text(documents.generated()[documents.SHIPPED], encoding="utf-8")
    row = quality_tables.measured("default")["tree"]
    found = quality_of(tree("static") | {"method": "draft_tree"})
    assert found.loss == -row["changes"]["log_p"]["value"] and found.error == pytest.approx(0.03) and found.images == 64
    assert found == quality_of(tree("static", "model")) and found.agreement < found.plain_agreement == 0.95
    assert quality_of(window(16)).loss == 0 and quality_of(cases["next_token"]).loss == 0
    assert quality_of(window(16, settle=0.05, lossless=False)).loss > 0
    assert quality_of(tree("chain")) is None and quality_of(tree("static") | {"rule": {"rule": "grouped"}}) is None


def test_published_scores_are_of_cases():
    named = {case.name for case in discrete_cases(None, None)}
    assert {case for case, *_ in results_tables.results("papers")} <= named and {
        case for *_, case in documents.METHODS
    } <= named


@pytest.mark.parametrize("node", quality_tables.HELP_PAGES)
def test_help_pages_of_relaxed_methods_show_what_was_measured(results, node):
    cases = quality_tables.HELP_PAGES[node]
    assert set(cases) <= {case.name for case in discrete_cases(None, None)}
    write(results, quality_report.model("default", CASES | dict.fromkeys(cases[:1], RELAXED)))
    for language, words in (("en", "64 images each"), ("zh", "每项 64 张图像")):
        table = documents.TABLES[f"quality of {node}, {language}"]()
        shown = [name for name in cases if name in {*CASES, cases[0]}]
        assert len(table.splitlines()) == 1 + len(shown) + 2 and words in table
        page = (documents.ROOT / f"web/docs/{node}/{language}.md").read_text(encoding="utf-8")
        assert f"<!-- table: quality of {node}, {language} -->" in page


def point(passes: float, loss: float, exact: bool = False) -> Point:
    return Point(f"{passes:g}, {loss:g}", passes, loss, (loss * 0.9, loss * 1.1), exact, False)


def test_the_front():
    points = [point(256, 0, True), point(48, 0, True), point(40, 0.5), point(45, 0.1), point(45, 0.2), point(60, 0.05)]
    assert [(p.passes, p.loss) for p in front(points)] == [(40, 0.5), (45, 0.1), (48, 0)]


def test_exact_methods_are_on_the_line_and_others_where_they_were_measured(results):
    cases = CASES | {"biased": EXACT}
    model = quality_report.model("default", cases)
    model["rows"][-1] |= {"inside": False, "changes": {"log_p": quality_report.around(-0.2, 0.1)}}
    write(results, model)
    points = {p.name: p for p in documents.quality_points(lambda row: row["changes"]["log_p"])}
    assert points["SJD, coupled (MC-SJD)"].loss == 0 and points["SJD, coupled (MC-SJD)"].listed
    row = quality_tables.measured("default")["LANTERN delta 0.3"]["changes"]["log_p"]
    lantern = points["LANTERN, k 1000, delta 0.3"]
    assert lantern.loss == -row["value"] > 0 and lantern.interval == (-row["interval"][1], -row["interval"][0])
    assert points["biased"].loss == 0.2 and points["biased"].interval == pytest.approx((0.1, 0.3))


def test_an_interval_around_nothing_begins_at_the_line(results):
    model = quality_report.model("default", CASES)
    model["rows"][4]["changes"]["log_p"] = {"value": 0.01, "interval": [-0.03, 0.02]}
    write(results, model)
    points = {p.name: p for p in documents.quality_points(lambda row: row["changes"]["log_p"])}
    lantern = points["LANTERN, k 1000, delta 0.3"]
    assert lantern.interval == (0, 0.03) and lantern.loss == 0.01
    below = documents._above_zero({"value": -0.01, "interval": [-0.03, 0.02]})
    assert below == {"value": 0, "interval": [0, 0.02]}


def texts(svg: str) -> list[str]:
    assert "prefers-color-scheme: dark" in svg and "currentColor" in svg and charts.INK not in svg
    return [element.text or "" for element in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]


def test_the_chart_of_quality_names_the_front_and_the_listed_methods_that_may_drift(results):
    write(results, quality_report.model("default", CASES))
    svg = documents.chart_of_quality()
    assert svg is not None
    shown = texts(svg)
    points = documents.quality_points(lambda row: row["changes"]["log_p"])
    named = [p.name for p in points if p in front(points) or (p.listed and not p.exact)]
    assert named and all(any(text.endswith(f": {name}") for text in shown) for name in named)
    assert any("256" in text for text in texts(quality_chart([("x", [point(48, 0, True), point(256, 0, True)])])))
