"""The caption cleaning of LlamaGen's training, which is that of DeepFloyd IF: it removes addresses, markup, file names,
product numbers and advertising from web text.

The original reads markup with BeautifulSoup and repairs characters with ftfy, which ComfyUI does not install: both are
followed here, except that text in the wrong encoding (mojibake) is left as it is.
"""

from __future__ import annotations

import html
import re
import unicodedata
from html.entities import html5
from html.parser import HTMLParser
from urllib.parse import unquote_plus

_DASHES = (
    "-\u058a\u05be\u1400\u1806\u2010-\u2015\u2e17\u2e1a\u2e3a\u2e3b\u2e40"
    "\u301c\u3030\u30a0\ufe31\ufe32\ufe58\ufe63\uff0d"
)
_FILES = "(?:png|jpe?g|bmp|webp|eps|pdf|apk|mp4)"
_DOMAINS = "(?:com|co|ru|net|org|edu|gov|it)"

Rules = tuple[tuple[re.Pattern, str], ...]


def _rules(*rules: tuple[str, str]) -> Rules:
    return tuple((re.compile(pattern), replacement) for pattern, replacement in rules)


_ADDRESSES = _rules(
    ("<person>", "person"),
    *(
        (rf"\b(?:{start}:(?:/{{1,3}}|[a-z0-9%])|[a-z0-9.-]+\.{_DOMAINS}[\w/-]*\b/?(?!@))", "")
        for start in ("https?", "www")
    ),
)
_MARKS = _rules(
    (r"@\w+\b", ""),  # account names
    ("[\u31c0-\u9fff]+", ""),  # Chinese characters, and the blocks between strokes and ideographs
    (f"[{_DASHES}]+", "-"),
    ("[`´«»“”¨]", '"'),
    ("[‘’]", "'"),
    ("&quot;?", ""),
    ("&amp", ""),
    (r"(?:\d{1,3}\.){3}\d{1,3}", " "),  # IP addresses
    (r"\d:\d\d\s+$", ""),
    (r"\\n", " "),
    (r"#\d{1,3}\b", ""),
    (r"#\d{5,}\b", ""),
    (r"\b\d{6,}\b", ""),
    (rf"\S+\.{_FILES}", ""),
    ("[\"']{2,}", '"'),
    (r"\.{2,}", " "),
    (r"[][#®•©™&@·º½¾¿¡§~(){}|\\/*]+", " "),
    (r"\s+\.\s+", " "),
)
_WORDS = _rules(
    (r"\b[a-zA-Z]{1,3}\d{3,15}\b", ""),  # product numbers
    (r"\b[a-zA-Z]+\d+[a-zA-Z]+\b", ""),
    (r"\b\d+[a-zA-Z]+\d+\b", ""),
    (r"(?:worldwide\s+)?(?:free\s+)?shipping", ""),  # advertising
    (r"(?:free\s)?download(?:\sfree)?", ""),
    (r"\bclick\s(?:for|on)\s\w+", ""),
    (rf"\b{_FILES}(?:\simages?)?", ""),
    (r"\bpage\s+\d+\b", ""),
    (r"\b\d*[a-zA-Z]+\d+[a-zA-Z]+\d+[a-zA-Z\d]*\b", " "),
    (r"\b\d+\.?\d*[xх×]\d+\.?\d*\b", ""),  # sizes; the second x is Cyrillic
    (r"\b\s+:\s+", ": "),
    (r"(\D[,./])\b", r"\1 "),
    (r"\s+", " "),
    (r"^[\"']([\w\W]+)[\"']$", r"\1"),  # quotation marks around everything
    (r"^['_,\-:;]", ""),
    (r"['_,\-:+]$", ""),
    (r"^\.\S+$", ""),
)


def clean_caption(text: str) -> str:
    """One pass of cleaning; LlamaGen does two."""
    text = _applied(_ADDRESSES, unquote_plus(text).strip().lower())
    text = _applied(_MARKS, _without_tags(text))
    if len(re.findall("[-_]", text)) > 3:  # words-joined-like-this
        text = re.sub("[-_]", " ", text)
    text = html.unescape(html.unescape(_repaired(text))).strip()
    return _applied(_WORDS, text).strip()


def _applied(rules: Rules, text: str) -> str:
    for pattern, replacement in rules:
        text = pattern.sub(replacement, text)
    return text


_ALONE = frozenset(  # tags that enclose nothing
    "area base basefont bgsound br col command embed frame hr image img input isindex keygen link menuitem meta nextid "
    "param source spacer track wbr".split()
)
_UNSHOWN = frozenset(("rp", "rt", "script", "style", "template"))  # tags whose content is not part of the text


class _Text(HTMLParser):
    """Collects the text between tags, as BeautifulSoup does with this parser."""

    def __init__(self):
        super().__init__(convert_charrefs=False)
        self.parts: list[str] = []
        self.open: list[str] = []  # tags, the outermost first

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in _ALONE:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        while tag in self.open and self.open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if _UNSHOWN.isdisjoint(self.open):
            self.parts.append(data)

    def handle_entityref(self, name: str) -> None:
        self.handle_data(html5.get(f"{name};", f"&{name}"))

    def handle_charref(self, name: str) -> None:
        self.handle_data(html.unescape(f"&#{name};"))

    def unknown_decl(self, data: str) -> None:
        if data.upper().startswith("CDATA["):
            self.parts.append(data[len("CDATA[") :])


def _without_tags(text: str) -> str:
    parser = _Text()
    try:
        parser.feed(text)
        parser.close()
    except AssertionError:  # what the parser cannot read, such as "<![x", is no markup
        return text
    return "".join(parser.parts)


_CONTROLS = dict.fromkeys([*range(9), 11, *range(14, 32), 127, *range(0x206A, 0x2070), 0xFEFF, *range(0xFFF9, 0xFFFD)])
_CHARACTERS = {  # compatibility characters -> what they stand for; typographic quotation marks
    **{
        code: unicodedata.normalize("NFKC", chr(code))
        for code in (*map(ord, "ĲĳŉǄǅǆǇǈǉǊǋǌǱǲǳﬀﬁﬂﬃﬄﬆ"), 0x3000, *range(0xFF01, 0xFFF0))
    },
    ord("ﬅ"): "ſt",
    **dict.fromkeys(range(0x201C, 0x2020), '"'),
    **dict.fromkeys((0x2BC, *range(0x2018, 0x201C)), "'"),
}


def _repaired(text: str) -> str:
    """What ftfy makes of a text that was decoded correctly."""
    text = re.sub("[\x80-\x9f]", lambda found: found[0].encode("latin-1").decode("cp1252", "ignore") or found[0], text)
    text = text.translate(_CHARACTERS).translate(_CHARACTERS)  # twice: one of them becomes a quotation mark
    return unicodedata.normalize("NFC", text.translate(_CONTROLS))
