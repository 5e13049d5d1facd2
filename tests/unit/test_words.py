"""Help pages and translations: complete, of the same shape in every language, and with an image."""

import json
import re
from pathlib import Path

import pytest
from comfyui_specar.reports import acceptance_map
from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
LANGUAGES = ("en", "zh")
NODES = json.loads((ROOT / "locales/en/nodeDefs.json").read_text("utf-8"))
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


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("node", NODES)
def test_help_page_names_every_widget_and_shows_the_image(node, language):
    text = page(node, language)
    assert text.startswith(f"# {locale(language, 'nodeDefs')[node]['display_name']}\n")
    sockets = {"model", "positive", "negative", "latent_image"}  # of every sampler, explained on one page
    missing = NODES[node]["inputs"].keys() - named_inputs(node, language) - sockets
    assert not missing
    # The frontend resolves paths from web/docs.
    assert re.search(rf"!\[[^\]]+\]\({node}/picture\.webp\)", text), "no screenshot"


@pytest.mark.parametrize("node", NODES)
def test_image_is_small_and_readable(node):
    file = ROOT / f"web/docs/{node}/picture.webp"
    assert file.stat().st_size <= MOST_BYTES
    width, height = Image.open(file).size
    assert width > 500 and height > 200


def test_no_image_or_page_is_left_of_nodes_that_are_gone():
    assert {path.name for path in (ROOT / "web/docs").iterdir()} == set(NODES)


@pytest.mark.parametrize("file", ["nodeDefs", "main"])
def test_translation_has_the_same_keys(file):
    english, chinese = dict(leaves(locale("en", file))), dict(leaves(locale("zh", file)))
    assert list(chinese) == list(english)
    assert all(text.strip() for text in chinese.values())
    untranslated = [key for key, text in chinese.items() if not key.endswith(".name") and not CHINESE.search(text)]
    assert not untranslated


def test_categories_and_types_are_translated():
    """Those that ComfyUI does not know: parts of categories, and types, from which outputs of that name are called."""
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "nodes").glob("*.py"))
    main = locale("zh", "main")
    used = set(re.findall(r'category="SpecAR/(\w+)"', source)) - {"loaders", "latent", "sampling", "conditioning"}
    assert set(main["nodeCategories"]) == used
    assert set(main["dataTypes"]) == set(re.findall(r'"(AR_[A-Z]+)"', (ROOT / "nodes/sockets.py").read_text("utf-8")))


@pytest.mark.parametrize("node", NODES)
def test_translated_page_has_the_same_lists_and_code(node):
    english, chinese = page(node, "en"), page(node, "zh")
    for what in (r"^#+ ", r"^\*\*[^*]+\*\*$", r"^\* "):
        assert len(re.findall(what, chinese, re.M)) == len(re.findall(what, english, re.M)), what
    assert set(code(chinese)) == set(code(english))
    assert CHINESE.search(chinese)


def patterns() -> dict[str, re.Pattern]:
    """By key, what web/js/words.js takes for its text."""
    script = (ROOT / "web/js/words.js").read_text("utf-8")
    numbers = re.findall(r'"(\w+)"', re.search(r"const NUMBERS = \[(.*)\]", script)[1])
    value = {name: r"-?[\d.]+%?" for name in numbers}
    return {
        key: re.compile(re.sub(r"\\{(\w+)\\}", lambda name: value.get(name[1], ".+?"), re.escape(key)))
        for key in locale("en", "main")["specar"]
    }


def test_no_text_is_taken_for_another_that_stands_before_it():
    known = patterns()
    for key in known:
        text = re.sub(r"\{\w+\}", "7", key)
        assert next(each for each, pattern in known.items() if pattern.fullmatch(text)) == key


def test_what_the_page_says_is_offered_to_translators():
    """Texts of web/js and of legends and charts are keys of main.json, which the page looks them up by."""
    known = locale("en", "main")["specar"]
    assert all(key == text for key, text in known.items())
    scripts = "".join(path.read_text("utf-8") for path in (ROOT / "web/js").glob("*.js"))
    said = re.findall(r'\bsay\("([^"]+)"', scripts)
    assert said and set(said) <= set(known)
    legend = [name for name, _ in acceptance_map.SOURCES.values()] + [*acceptance_map.CONTINUOUS_NAMES.values()]
    assert set(legend) <= set(known)


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


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda path: path.stem)
def test_a_template_has_a_translation_with_the_same_numbers_and_links(template):
    """web/js/templates.js takes a graph for a template only if all lines of its note are keys."""
    words = locale("zh", "main")["specar"]
    for text in {*texts_of(template)} - NAMES:
        assert (key := key_of(text)), text
        assert sorted(FACTS.findall(words[key])) == sorted(FACTS.findall(key)), key


def test_no_translation_is_left_of_a_note_that_has_changed():
    used = {key_of(text) for template in TEMPLATES for text in texts_of(template)}
    assert {key for key in locale("en", "main")["specar"] if "**" in key} <= used
