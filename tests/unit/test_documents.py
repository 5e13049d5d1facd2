"""Documents tell the truth: links and anchors lead somewhere, tables are those of the results, commands exist."""

import json
import math
import re
import shlex
import sys
import unicodedata
from collections import Counter
from html.parser import HTMLParser
from importlib import import_module
from pathlib import Path
from urllib.parse import unquote

import comfyui_specar
import pytest
from cmarkgfm import Options, github_flavored_markdown_to_html
from comfyui_specar.tools.benchmarks import documents, results_tables, subjects

ROOT = Path(comfyui_specar.__file__).resolve().parent
HELP = ROOT / "web/docs"  # ComfyUI's front end resolves paths in help pages from this folder
DOCUMENTS = [*documents.files(), *ROOT.glob("assets/*/*.md")]
CODE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[(?:[^][]|\[[^][]*\])*\]\(([^)\s]+)\)|(?:src|srcset|href)=\"([^\"]+)\"")
OPTION = re.compile(r"--[a-z][a-z-]*")
OURS = re.compile(
    r"python\S* (?:-m (comfyui_specar\.batch|tools\.benchmarks \w+|tools\.training[\w.]*)"
    r"|\S*(ComfyUI-SpecAR[/\\]batch))(?= |$)|bash (tools/\w+\.sh)"
)
MARKUP = re.compile(r"\]\(|\*\S|\S\*")  # of a link or of emphasis that was not rendered
COMMENTED_LINE = re.compile(r"^ *<!--.*?-->(?!\n)", re.MULTILINE)  # it begins a block of HTML: not rendered
OUR_FILE = re.compile(r"(workflows|docs|tests|tools)/[\w./ ,()-]+")


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def links(file: Path) -> list[str]:
    prose = CODE.sub("", file.read_text(encoding="utf-8"))
    prose = re.sub(r"`[^`\n]*`", "", prose)
    return [found for pair in LINK.findall(prose) for found in pair if found]


def anchors(file: Path) -> set[str]:
    """The anchors that GitHub gives to a document's headings."""
    seen, found = Counter(), set()
    for heading in re.findall(r"^#{1,6} (.+)$", CODE.sub("", file.read_text(encoding="utf-8")), re.MULTILINE):
        text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").strip().lower()
        kept = (c for c in text if c in " -_" or unicodedata.category(c)[0] in "LN")
        slug = "".join(kept).replace(" ", "-")
        found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return found


@pytest.mark.parametrize("file", DOCUMENTS, ids=name)
def test_every_link_and_anchor_leads_somewhere(file):
    missing = []
    for link in links(file):
        path, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", link):
            continue
        base = HELP if file.is_relative_to(HELP) else file.parent
        target = base / unquote(path) if path else file
        if not target.exists() or (anchor and anchor not in anchors(target)):
            missing.append(link)
    assert not missing


class Prose(HTMLParser):
    """The text of a page that is not code."""

    def __init__(self, page: str):
        super().__init__()
        self.text, self.code = "", 0
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.code += tag == "code"

    def handle_endtag(self, tag):
        self.code -= tag == "code"

    def handle_data(self, data):
        self.text += "" if self.code else data


def unrendered(markdown: str) -> list[str]:
    """Markup that a reader sees as such."""
    seen = Prose(github_flavored_markdown_to_html(markdown, Options.CMARK_OPT_UNSAFE)).text
    return MARKUP.findall(seen) + COMMENTED_LINE.findall(markdown)


@pytest.mark.parametrize("file", DOCUMENTS, ids=name)
def test_no_markup_is_left_as_it_is_written(file):
    assert unrendered(file.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("readme", ["README.md", "docs/README.zh-CN.md"])
def test_the_line_to_clone_has_the_address_of_the_pack(readme):
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    address = re.search(r'^Repository = "(.+?)"', project, re.MULTILINE)[1]
    text = (ROOT / readme).read_text(encoding="utf-8")
    assert f"git clone {address}\n" in text and {*re.findall(r"https://github\.com/[\w./-]+", text)} == {address}


@pytest.mark.parametrize("file", documents.files(), ids=name)
def test_tables_are_those_of_the_results(file):
    text = file.read_text(encoding="utf-8")
    assert documents.written(text) == text, "run: python -m tools.benchmarks documents"


def test_every_table_is_in_a_document_and_generated_files_are_those_of_the_results():
    texts = "".join(file.read_text(encoding="utf-8") for file in documents.files())
    assert {found[1] for found in documents.TABLE.findall(texts)} == documents.TABLES.keys()
    for file, content in documents.generated().items():
        assert file.read_text(encoding="utf-8") == content, "run: python -m tools.benchmarks documents"
    for file in (documents.QUALITY_CHART, documents.SHIPPED):
        assert file.exists() == (file in documents.generated())


def test_a_wrong_number_is_noticed():
    text = (ROOT / "docs/numbers.md").read_text(encoding="utf-8")
    spoiled = re.sub(r"(\| yes \| )\d+", r"\g<1>7", text)
    assert spoiled != text and documents.written(spoiled) == text


def test_no_relaxed_rule_bounds_the_drift_of_whole_images():
    """As docs/methods/README.md says: summed over an image, every known drift bound of the tables is above 1."""
    rows = [row for guidance in (1.0, 2.0) for row in results_tables.cases("default-cpu", guidance).values()]
    bounds = [bound * results_tables.tokens(row) for row in rows if (bound := results_tables.drift(row))]
    assert bounds and min(bounds) > 1


def test_the_speed_report_is_asked_for_every_method_of_the_table():
    assert {case for *_, case in documents.METHODS} <= {*subjects.METHODS}
    assert len({*subjects.METHODS}) == len(subjects.METHODS)


def test_times_are_those_of_the_mean_passes(monkeypatch):
    """A round costs twice as much, and 60 of 240 passes are left."""
    timed = [{"name": name, "ms_over": {"next_token": ratio}} for name, ratio in (("next_token", 1.0), ("fast", 0.5))]
    report = {"models": [{"name": "default", "settings": {"cfg": 3.0}, "rows": timed}]}
    monkeypatch.setattr(results_tables, "results", lambda name: report)
    found = results_tables.times("default", 3.0, "speed-cpu", {"next_token": 240.0, "fast": 60.0})
    assert found["next_token"] == 1 and found["fast"] == 0.5 and math.isnan(found["absent"])


def test_the_error_of_a_mean_is_that_of_its_prompts(monkeypatch):
    """Images of a prompt that are alike say no more than one."""
    monkeypatch.setattr(results_tables, "results", lambda name: {"prompts": ["a", "b"]})
    assert results_tables.over_prompts("", [1, 1, 1, 3, 3, 3]) == pytest.approx(1.0)
    assert results_tables.over_prompts("", [1, 3, 2, 2]) == 0


@pytest.fixture(scope="module")
def pairs():
    """A request to a model and a drafter for it, of token ids and of vectors."""
    found = {}
    for kind, drafter in (("default", "eagle"), ("continuous", "small")):
        model = comfyui_specar.load_model(comfyui_specar.bundled(kind))
        request = model.request(model.encode_prompt("heart"))
        found[kind] = request, comfyui_specar.load_drafter(comfyui_specar.bundled(f"{kind}/{drafter}"), model)
    return found


@pytest.mark.parametrize(
    "page", sorted({*(ROOT / "docs/methods").glob("*.md")} - {ROOT / "docs/methods/README.md"}), ids=name
)
def test_every_method_page_has_lines_of_python_that_make_its_methods(page, pairs):
    code = [block for language, block in CODE.findall(page.read_text(encoding="utf-8")) if language == "python"]
    assert code
    request, drafter = pairs["continuous" if page.stem == "continuous" else "default"]
    for line in "".join(code).splitlines():
        eval(line, {"specar": comfyui_specar, "drafter": drafter}).check(request)  # noqa: S307 (our own documents)


@pytest.mark.parametrize("readme", ["README.md", "docs/README.zh-CN.md"])
def test_a_readme_is_short(readme):
    assert len((ROOT / readme).read_text(encoding="utf-8").splitlines()) <= 100


def test_every_node_is_listed():
    text = (ROOT / "docs/nodes.md").read_text(encoding="utf-8")
    nodes = json.loads((ROOT / "locales/en/nodeDefs.json").read_text(encoding="utf-8"))
    assert [node["display_name"] for node in nodes.values() if node["display_name"] not in text] == []


def test_every_picture_is_shown():
    shown = "".join(file.read_text(encoding="utf-8") for file in documents.files())
    pictures = [file for file in (ROOT / "docs/pictures").glob("**/*") if file.is_file()]
    assert [name(file) for file in pictures if file.name not in shown] == []


def snippets(text: str) -> list[str]:
    """Lines of code blocks without comments, and code in sentences."""
    blocks = (block for language, block in CODE.findall(text) if language in ("", "bash"))
    lines = [re.sub(r"\s+#.*", "", line).strip() for block in blocks for line in block.splitlines()]
    return lines + [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", CODE.sub("", text))]


def commands() -> list[tuple[str, str]]:
    """(module or script, command) of every command of ours in the documents."""
    found = {
        (next(filter(None, ours.groups())), snippet)
        for file in documents.files()
        for snippet in snippets(file.read_text(encoding="utf-8"))
        if (ours := OURS.search(snippet))
    }
    return sorted(found)


def options_of(what: str, capsys, monkeypatch) -> set[str]:
    """The options that a command's --help names."""
    if "batch" in what:
        from comfyui_specar.batch import cli as module
    elif what.startswith("tools.benchmarks "):
        module = import_module(f"comfyui_specar.{what.replace(' ', '.')}")
    else:
        module = import_module(f"comfyui_specar.{what}" + (".__main__" if what == "tools.training" else ""))
    monkeypatch.setattr(sys, "argv", [what, "--help"])
    with pytest.raises(SystemExit) as ended:
        module.main()
    assert not ended.value.code
    return set(OPTION.findall(capsys.readouterr().out))


@pytest.mark.parametrize(("what", "command"), commands())
def test_commands_have_the_options_and_files_that_documents_use(what, command, capsys, monkeypatch):
    words = shlex.split(command.replace("\\", "/"))
    assert [word for word in words if OUR_FILE.fullmatch(word) and not (ROOT / word).exists()] == []
    used = {word for word in words if OPTION.fullmatch(word)}
    if what == "tools/demo.sh":
        known = set(OPTION.findall((ROOT / "tools/demo.py").read_text(encoding="utf-8")))
    elif what.startswith("tools/"):  # test.sh hands its options to pytest
        known = {"--write-contract"}
    else:
        known = options_of(what, capsys, monkeypatch) | {"--help"}
    assert used <= known


def test_the_table_that_is_shown_is_that_of_the_file():
    table = (ROOT / "docs/jobs.csv").read_text(encoding="utf-8")
    blocks = CODE.findall((ROOT / "docs/batches.md").read_text(encoding="utf-8"))
    assert [block for _, block in blocks if block.startswith("id,prompt,seed\n") and table.startswith(block)]
