"""Untrusted text in messages and logs."""

import unicodedata

import pytest
from comfyui_specar.common.printable import printable
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
    assert not {unicodedata.category(c) for c in printable(text).replace("\u200c", "").replace("\u200d", "")} & {
        "Cc",
        "Cf",
        "Cs",
        "Zl",
        "Zp",
    }
    printable(text).encode()
    more = f"... ({len(text)} characters)" if len(text) > most else ""
    assert printable(text, most) == printable(text[:most]) + more
