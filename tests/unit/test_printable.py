"""Untrusted text in messages and logs."""

import logging
import unicodedata

import pytest
from comfyui_specar.limits.printable import PrintableLog, make_printable, printable
from hypothesis import given
from hypothesis import strategies as st


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("cat, 3d, on a blue background", "cat, 3d, on a blue background"),
        ("Hütte \u732b\u3000\u05d0 \U0001f469\u200d\U0001f680", "Hütte \u732b\u3000\u05d0 \U0001f469\u200d\U0001f680"),
        ("\x1b[2J\x1b]0;title\x07", r"\x1b[2J\x1b]0;title\x07"),
        ("\x9b2J\x7f\0", r"\x9b2J\x7f\x00"),
        ("a\u202egnp.exe", r"a\u202egnp.exe"),
        ("\u2066x\u2069\u200f", r"\u2066x\u2069\u200f"),
        ("one\ntwo\r\u2028three\t", r"one\ntwo\r\u2028three\t"),
        ("\ud800\U000e0041", r"\ud800\U000e0041"),
    ],
)
def test_what_is_seen_stays_and_what_acts_is_written_out(text, seen):
    assert printable(text) == seen


@given(text=st.text(st.characters()), most=st.integers(0, 20))
def test_any_text_becomes_one_line_that_any_file_takes(text, most):
    assert printable(printable(text)) == printable(text)
    categories = {unicodedata.category(c) for c in printable(text) if c not in "\u200c\u200d"}
    assert not categories & {"Cc", "Cf", "Cs", "Zl", "Zp"}
    printable(text).encode()
    more = f"... ({len(text)} characters)" if len(text) > most else ""
    assert printable(text, most) == printable(text[:most]) + more


def test_what_the_modules_of_a_package_log_is_printable_for_others(caplog):
    package, handler = logging.getLogger("some.package"), PrintableLog()
    package.addHandler(handler)
    logging.getLogger("some.package.a.b").warning("%s of %d", "\x1b[2J", 2)
    package.removeHandler(handler)
    logging.getLogger("some.package.a.b").warning("%s", "\x1b")
    assert caplog.messages == [r"\x1b[2J of 2", "\x1b"]


def test_errors_are_made_printable_with_those_they_came_from():
    """Also where they are a circle; ends of lines stay, and so does what is no text."""
    inner, outer = KeyError("\x1b", 5), ValueError("a\n\x1b[1mb")
    outer.__context__, inner.__cause__ = inner, outer
    make_printable(outer)
    assert inner.args == (r"\x1b", 5) and outer.args == ("a\n\\x1b[1mb",)
