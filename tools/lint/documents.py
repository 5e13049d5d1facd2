"""Documents: links and anchors lead somewhere, tables are those of the results, commands exist."""

import contextlib
import importlib
import io
import json
import re
import shlex
import sys
import unicodedata
from collections import Counter
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from unittest import mock
from urllib.parse import unquote

from cmarkgfm import Options, github_flavored_markdown_to_html
from comfyui_specar.tools.benchmarks import documents

ROOT = Path(__file__).resolve().parents[2]
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
READMES = ("README.md", "docs/README.zh-CN.md")
OUR_FILE = re.compile(r"(workflows|docs|tests|tools)/[\w./ ,()-]+")


def read(path: str | Path) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def links(file: Path) -> list[str]:
    prose = CODE.sub("", read(file))
    prose = re.sub(r"`[^`\n]*`", "", prose)
    return [found for pair in LINK.findall(prose) for found in pair if found]


def anchors(file: Path) -> set[str]:
    """The anchors that GitHub gives to a document's headings."""
    seen, found = Counter(), set()
    for heading in re.findall(r"^#{1,6} (.+)$", CODE.sub("", read(file)), re.MULTILINE):
        text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").strip().lower()
        kept = (c for c in text if c in " -_" or unicodedata.category(c)[0] in "LN")
        slug = "".join(kept).replace(" ", "-")
        found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return found


def broken_links() -> Iterator[str]:
    for file in DOCUMENTS:
        for link in links(file):
            path, _, anchor = link.partition("#")
            if re.match(r"[a-z]+:", link):
                continue
            target = (HELP if file.is_relative_to(HELP) else file.parent) / unquote(path) if path else file
            if not target.exists() or (anchor and anchor not in anchors(target)):
                yield f"{name(file)}: {link} leads nowhere"


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


def markup_left_as_it_is_written() -> Iterator[str]:
    for file in DOCUMENTS:
        yield from (f"{name(file)}: {found} is not rendered" for found in unrendered(read(file)))


def readmes() -> Iterator[str]:
    """Short, and their line to clone has the address of the pack."""
    address = re.findall(r'^Repository = "(.+?)"', read("pyproject.toml"), re.MULTILINE)[0]
    for readme in READMES:
        text = read(readme)
        if len(text.splitlines()) > 100:
            yield f"{readme} has more than 100 lines"
        if f"git clone {address}\n" not in text or {*re.findall(r"https://github\.com/[\w./-]+", text)} != {address}:
            yield f"{readme} names another address than pyproject.toml"


def tables() -> Iterator[str]:
    """Those of the results; each is shown, and so are all pictures, nodes, and the table of jobs as its file is."""
    texts = {file: read(file) for file in documents.files()}
    everything = "".join(texts.values())
    for file, text in texts.items():
        if documents.written(text) != text:
            yield f"{name(file)}: run python -m tools.benchmarks documents"
    for table in {found[1] for found in documents.TABLE.findall(everything)} ^ documents.TABLES.keys():
        yield f"the table {table} is in no document, or in no list"
    for file, content in documents.generated().items():
        if read(file) != content:
            yield f"{name(file)}: run python -m tools.benchmarks documents"
    for file in (documents.QUALITY_CHART, documents.SHIPPED):
        if file.exists() != (file in documents.generated()):
            yield f"{name(file)} is not generated"
    for picture in (ROOT / "docs/pictures").glob("**/*"):
        if picture.is_file() and picture.name not in everything:
            yield f"{name(picture)} is shown nowhere"
    listed = read("docs/nodes.md")
    for node in json.loads(read("locales/en/nodeDefs.json")).values():
        if node["display_name"] not in listed:
            yield f"docs/nodes.md does not list {node['display_name']}"
    jobs = [block for _, block in CODE.findall(texts[ROOT / "docs/batches.md"]) if block.startswith("id,prompt,seed\n")]
    if not any(read("docs/jobs.csv").startswith(block) for block in jobs):
        yield "docs/batches.md shows another table than docs/jobs.csv"


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
        for snippet in snippets(read(file))
        if (ours := OURS.search(snippet))
    }
    return sorted(found)


def options_of(what: str) -> set[str]:
    """The options that a command's --help names."""
    main = {"comfyui_specar.batch": "batch.cli", "tools.training": "tools.training.__main__"}
    module = importlib.import_module(f"comfyui_specar.{main.get(what, what.replace(' ', '.'))}")
    asked, said = mock.patch.object(sys, "argv", [what, "--help"]), io.StringIO()
    with asked, contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
        module.main()
    return set(OPTION.findall(said.getvalue()))


def unknown_commands() -> Iterator[str]:
    for what, command in commands():
        words = shlex.split(command.replace("\\", "/"))
        absent = [word for word in words if OUR_FILE.fullmatch(word) and not (ROOT / word).exists()]
        if what == "tools/demo.sh":
            known = set(OPTION.findall(read("tools/demo.py")))
        elif what.startswith("tools/"):
            known = {"--write-contract", "--all"}  # of test.sh, which hands others to pytest
        else:
            known = options_of("comfyui_specar.batch" if "batch" in what else what) | {"--help"}
        absent += [word for word in words if OPTION.fullmatch(word) and word not in known]
        yield from (f"{command}: there is no {word}" for word in absent)


CHECKS = (broken_links, markup_left_as_it_is_written, readmes, tables, unknown_commands)
