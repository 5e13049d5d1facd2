"""Numbers of documents, the lines of Python on the pages of methods, and the lint of documents."""

import re

import comfyui_specar
import pytest
from comfyui_specar.tools.benchmarks import documents as written
from comfyui_specar.tools.benchmarks import quality_tables, subjects
from comfyui_specar.tools.lint import documents

ROOT = documents.ROOT


@pytest.mark.parametrize(
    ("check", "spoil"),
    [
        (documents.broken_links, lambda text: text + "\n[page](nowhere.md)\n"),
        (documents.broken_links, lambda text: text + "\n[heading](numbers.md#nowhere)\n"),
        (documents.markup_left_as_it_is_written, lambda text: text + "\na ** bold** word\n"),
        (documents.tables, lambda text: re.sub(r"(\| yes \| )\d+", r"\g<1>7", text)),
        (documents.unknown_commands, lambda text: text + "\n`python -m tools.benchmarks speed --nonsense`\n"),
    ],
)
def test_the_lint_notices(check, spoil, monkeypatch):
    read, page = documents.read, ROOT / "docs/numbers.md"
    monkeypatch.setattr(documents, "read", lambda path: spoil(read(path)) if path == page else read(path))
    problems = [*check()]
    assert problems and all("numbers.md" in problem or "nonsense" in problem for problem in problems)


def test_no_relaxed_rule_bounds_the_drift_of_whole_images():
    """As docs/methods/README.md says: summed over an image, every known drift bound of the tables is above 1."""
    bounds = [row["drift_bound_per_token"] or 0 for row in quality_tables.measured("default").values()]
    assert max(bounds) > 0 and 256 * min(filter(None, bounds)) > 1


def test_the_speed_report_is_asked_for_every_method_of_the_table():
    assert {case for *_, case in written.METHODS} <= {*subjects.METHODS}
    assert len({*subjects.METHODS}) == len(subjects.METHODS)


@pytest.fixture(scope="module")
def pairs():
    """A request to a model and a drafter for it, of token ids and of vectors."""
    found = {}
    for kind, drafter in (("default", "eagle"), ("continuous", "small")):
        model = comfyui_specar.load_model(comfyui_specar.bundled(kind))
        request = model.request(model.encode_prompt("heart"))
        found[kind] = request, comfyui_specar.load_drafter(comfyui_specar.bundled(f"{kind}/{drafter}"), model)
    return found


def test_pages_of_methods_have_lines_of_python_that_make_them(pairs):
    for page in {*(ROOT / "docs/methods").glob("*.md")} - {ROOT / "docs/methods/README.md"}:
        code = [block for language, block in documents.CODE.findall(documents.read(page)) if language == "python"]
        assert code, page
        request, drafter = pairs["continuous" if page.stem == "continuous" else "default"]
        for line in "".join(code).splitlines():
            eval(line, {"specar": comfyui_specar, "drafter": drafter}).check(request)  # noqa: S307 (our own documents)
