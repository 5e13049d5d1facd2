"""Untrusted text (of files, servers, tables), made safe for a terminal or a log."""

import logging
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


def printable_lines(text: str) -> str:
    """The text, each line of it printable."""
    return "\n".join(map(printable, text.split("\n")))


def make_printable(error: BaseException | None) -> None:
    """Writes out what is not seen in the texts of an error, and of those that a traceback shows before it."""
    seen: set[int] = set()
    while error and id(error) not in seen:
        seen.add(id(error))
        error.args = tuple(printable_lines(part) if isinstance(part, str) else part for part in error.args)
        error = error.__cause__ or error.__context__


class PrintableLog(logging.Handler):
    """Of the logger of a package: what its modules log is printable before other handlers, the root's, write it."""

    def emit(self, record: logging.LogRecord) -> None:
        record.msg, record.args = printable(record.getMessage()), ()
