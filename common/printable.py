"""Untrusted text (of files, servers, tables), made safe for a terminal or a log."""

import unicodedata

# Control characters (ESC moves the cursor and changes colours), marks of the writing direction, which show a text in
# another order than it has, halves of characters, and ends of lines and paragraphs.
UNSEEN = ("Cc", "Cf", "Cs", "Zl", "Zp")
JOINERS = "\u200c\u200d"  # of the first kind, too, but part of words (Persian, Hindi) and of emoji


def printable(text: str, most: int | None = None) -> str:
    """The text in one line, in which each character that does something instead of being seen is written as Python
    writes it (``\\x1b``, ``\\u202e``, ``\\n``). most: so many characters of it at most, then how many it has."""
    cut = text if most is None or len(text) <= most else text[:most]
    seen = (
        cut
        if cut.isprintable()
        else "".join(
            c if c in JOINERS or unicodedata.category(c) not in UNSEEN else c.encode("unicode_escape").decode()
            for c in cut
        )
    )
    return seen if cut is text else f"{seen}... ({len(text)} characters)"
