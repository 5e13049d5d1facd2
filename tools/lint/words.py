"""Help pages and translations: complete, of the same shape in every language, and with an image."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

from comfyui_specar.reports import acceptance_map
from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
LANGUAGES = ("en", "zh")
NODES = json.loads((ROOT / "locales/en/nodeDefs.json").read_text("utf-8"))
PAGES = sorted(path.name for path in (ROOT / "web/docs").iterdir())
REFERENCE = {"en": r"other inputs are those of (.+?)\.", "zh": r"其他输入与“(.+?)”相同"}  # to another node's page
VALUES = {
    "verbatim": r"\[\S+\]\(\S+\)|hf download .+",
    "folder": r"models/[^\s*]+",
    "number": r"[\d.]+",
}  # of templates
FACTS = re.compile(r"\]\([^)]+\)|\{\w+\}|models/[\w./-]*\w|[a-zA-Z0-9_-]+\.[a-z]+|\b\d+(?:\.\d+)?")
TEMPLATES = sorted((ROOT / "workflows").glob("*.json"))
NAMES = {"SJD++", "LANTERN++", "Cool-SD", "ADT-Tree", "VVS"}  # the same in every language
CHINESE = re.compile(r"[\u4e00-\u9fff]")
MOST_BYTES = 40 * 1024


def page(node: str, language: str) -> str:
    return (ROOT / f"web/docs/{node}/{language}.md").read_text("utf-8")


def locale(language: str, file: str) -> dict:
    return json.loads((ROOT / f"locales/{language}/{file}.json").read_text("utf-8"))


def code(text: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", text)


def named_inputs(node: str, language: str) -> set[str]:
    """Inputs that the page names, itself or through the page that it refers to (`a_1` ... `a_8` names eight)."""
    text = page(node, language)
    named = set(code(text))
    for stem, first, last in re.findall(r"`(\w+_)(\d)` \.\.\. `\1(\d)`", text):
        named |= {f"{stem}{i}" for i in range(int(first), int(last) + 1)}
    for title in re.findall(REFERENCE[language], text):
        [other] = [key for key, words in locale(language, "nodeDefs").items() if words["display_name"] == title]
        named |= named_inputs(other, language)
    return named


def leaves(words: dict, path: str = ""):
    for key, value in words.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{path}.{key}")
        else:
            yield f"{path}.{key}", value


def help_pages() -> Iterator[str]:
    """A page names every widget and shows an image that is small and readable. Every node has one but rules, which may
    do without: ComfyUI then shows the description, and a table of the inputs with their tooltips."""
    for node in {*PAGES} - {*NODES} | {node for node in NODES if not node.startswith("SpecARRule")} - {*PAGES}:
        yield f"web/docs/{node} has no node, or no page"
    for node, language in ((node, language) for node in PAGES for language in LANGUAGES):
        text, title = page(node, language), locale(language, "nodeDefs")[node]["display_name"]
        if not text.startswith(f"# {title}\n"):
            yield f"{node}/{language}.md is not headed {title}"
        sockets = {"model", "positive", "negative", "latent_image"}  # of every sampler, explained on one page
        for missing in NODES[node]["inputs"].keys() - named_inputs(node, language) - sockets:
            yield f"{node}/{language}.md does not name {missing}"
        if not re.search(rf"!\[[^\]]+\]\({node}/picture\.webp\)", text):  # the front end starts at web/docs
            yield f"{node}/{language}.md shows no image"
    for node in PAGES:
        file = ROOT / f"web/docs/{node}/picture.webp"
        width, height = Image.open(file).size
        if file.stat().st_size > MOST_BYTES or width <= 500 or height <= 200:
            yield f"{node}/picture.webp has {file.stat().st_size} bytes and {width} x {height} pixels"


def translations() -> Iterator[str]:
    for file in ("nodeDefs", "main"):
        english, chinese = dict(leaves(locale("en", file))), dict(leaves(locale("zh", file)))
        if list(chinese) != list(english):
            yield f"locales/zh/{file}.json has other keys, or another order: {[*english.keys() ^ chinese.keys()]}"
        for key, text in chinese.items():
            if not text.strip() or not (key.endswith(".name") or CHINESE.search(text)):
                yield f"locales/zh/{file}.json: {key} is not translated"
    for node in PAGES:
        english, chinese = page(node, "en"), page(node, "zh")
        shapes = (r"^#+ ", r"^\*\*[^*]+\*\*$", r"^\* ")
        alike = all(len(re.findall(what, chinese, re.M)) == len(re.findall(what, english, re.M)) for what in shapes)
        if not (alike and set(code(chinese)) == set(code(english)) and CHINESE.search(chinese)):
            yield f"web/docs/{node}: en.md and zh.md have other headings, lists or code"


def categories_and_types() -> Iterator[str]:
    """Those that ComfyUI does not know: parts of categories, and types, from which outputs of that name are called."""
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "nodes").glob("*.py"))
    main = locale("zh", "main")
    used = set(re.findall(r'category="SpecAR/(\w+)"', source)) - {"loaders", "latent", "sampling", "conditioning"}
    types = set(re.findall(r'"(AR_[A-Z]+)"', (ROOT / "nodes/sockets.py").read_text("utf-8")))
    for word in (set(main["nodeCategories"]) ^ used) | (set(main["dataTypes"]) ^ types):
        yield f"locales/zh/main.json: {word} is not translated, or not used"


def patterns() -> dict[str, re.Pattern]:
    """By key, what web/js/words.js takes for its text."""
    script = (ROOT / "web/js/words.js").read_text("utf-8")
    [listed] = re.findall(r"const NUMBERS = \[(.*)\]", script)
    numbers = re.findall(r'"(\w+)"', listed)
    value = {name: r"-?[\d.]+%?" for name in numbers}
    return {
        key: re.compile(re.sub(r"\\{(\w+)\\}", lambda name: value.get(name[1], ".+?"), re.escape(key)))
        for key in locale("en", "main")["specar"]
    }


def words_of_the_page() -> Iterator[str]:
    """Texts of web/js and of legends and charts are keys of main.json, none of which is taken for another."""
    known, found = locale("en", "main")["specar"], patterns()
    yield from (f"locales/en/main.json: {key!r} has another text" for key, text in known.items() if key != text)
    for key in found:
        text = re.sub(r"\{\w+\}", "7", key)
        if (first := next(each for each, pattern in found.items() if pattern.fullmatch(text))) != key:
            yield f"locales/en/main.json: {key!r} is taken for {first!r}, which stands before it"
    scripts = "".join(path.read_text("utf-8") for path in (ROOT / "web/js").glob("*.js"))
    said = {*re.findall(r'\bsay\("([^"]+)"', scripts)}
    legend = {name for name, _ in acceptance_map.SOURCES.values()} | {*acceptance_map.CONTINUOUS_NAMES.values()}
    yield from (f"locales/en/main.json lacks {text!r}" for text in (said | legend) - known.keys())


def texts_of(template: Path) -> list[str]:
    """The lines of its note, and the names that its nodes, their inputs and groups have of their own."""
    graph = json.loads(template.read_text("utf-8"))
    graphs = [graph, *graph.get("definitions", {}).get("subgraphs", ())]
    nodes = [node for each in graphs for node in each["nodes"]]
    [note] = [node["widgets_values"][0] for node in nodes if node["type"] == "MarkdownNote"]
    titles = [each.get("title") for each in (*nodes, *(group for each in graphs for group in each.get("groups", ())))]
    labels = [slot.get("label") for each in (*nodes, *graphs) for slot in each.get("inputs", ())]
    return [*re.split(r"\n+", note), *filter(None, titles + labels)]


def key_of(text: str) -> str | None:
    """The first of "specar" that stands for the text of a template."""
    for key in locale("en", "main")["specar"]:
        pattern = re.sub(r"\\{(\w+)\\}", lambda name: f"(?:{VALUES.get(name[1], '(?!)')})", re.escape(key))
        if re.fullmatch(pattern, text):
            return key
    return None


def templates() -> Iterator[str]:
    """Each has a translation with the same numbers and links, and no translation is left of a note that has changed.

    web/js/templates.js takes a graph for a template only if all lines of its note are keys.
    """
    words, used = locale("zh", "main")["specar"], set()
    for template in TEMPLATES:
        for text in texts_of(template):
            used.add(key := key_of(text))
            if key is None and text not in NAMES:
                yield f"{template.name}: {text!r} is not translated"
            elif key is not None and sorted(FACTS.findall(words[key])) != sorted(FACTS.findall(key)):
                yield f"locales/zh/main.json: the numbers or links of {key!r} differ"
    for key in {key for key in locale("en", "main")["specar"] if "**" in key} - used:
        yield f"locales/en/main.json: {key!r} is in no note"


CHECKS = (help_pages, translations, categories_and_types, words_of_the_page, templates)
