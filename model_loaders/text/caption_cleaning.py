"""The caption cleaning of LlamaGen's training, which is that of DeepFloyd IF: it removes addresses, markup, file names,
product numbers and advertising from web text.

The original reads markup with BeautifulSoup and repairs characters with ftfy, which ComfyUI does not install. Prompts
are no web pages: here a tag is what looks like one, and of characters only full-width ones are repaired.
"""

from __future__ import annotations

import html
import re
import unicodedata
from urllib.parse import unquote_plus

_DASHES = (
    "-\u058a\u05be\u1400\u1806\u2010-\u2015\u2e17\u2e1a\u2e3a\u2e3b\u2e40"
    "\u301c\u3030\u30a0\ufe31\ufe32\ufe58\ufe63\uff0d"
)
_FILES = "(?:png|jpe?g|bmp|webp|eps|pdf|apk|mp4)"
_DOMAINS = "(?:com|co|ru|net|org|edu|gov|it)"

_NARROW = {0x3000: " ", **{code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)}}  # full-width ones

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
_MARKUP = _rules(
    (r"</?[a-z][^<>]*>", ""),  # tags
    (r"&([a-z])$", r"\1"),  # what BeautifulSoup makes of "AT&T" at the end
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
    text = _replaced(_ADDRESSES, unquote_plus(text).strip().lower())
    text = _replaced(_MARKS, html.unescape(_replaced(_MARKUP, text)))
    if len(re.findall("[-_]", text)) > 3:  # words-joined-like-this
        text = re.sub("[-_]", " ", text)
    text = html.unescape(html.unescape(unicodedata.normalize("NFC", text.translate(_NARROW)))).strip()
    return _replaced(_WORDS, text).strip()


def _replaced(rules: Rules, text: str) -> str:
    for pattern, replacement in rules:
        text = pattern.sub(replacement, text)
    return text
