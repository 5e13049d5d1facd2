"""Addresses of servers. What is private in one, its login and its query (``?token=``), goes into requests and nowhere
else: not into files, messages or logs."""

import html
import json
import re
from base64 import b64encode
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, quote, quote_plus, unquote, urlsplit

from ..common.printable import printable

LOGIN = re.compile(r"(?<=://)[^/?#\s]*@")
QUERY = re.compile(r"(://[^\s?#]*\?)[^\s'\"]+")
HIDDEN = "***"
CUT = "... ("  # where `printable` ends a text that it shortens


@dataclass(frozen=True)
class Address:
    """name: what is shown and stored, and what tells servers apart. base: what the paths of requests are added to.
    headers, query: for every request. private: the values in them that nobody may see."""

    name: str
    base: str
    headers: dict[str, str] = field(repr=False)
    query: dict[str, str] = field(repr=False)
    private: tuple[str, ...] = field(repr=False)

    def hide(self, text: str) -> str:
        """The text of a server, which may repeat what it was asked with."""
        forms = {form for value in filter(None, self.private) for form in forms_of(value)}
        for form in sorted(forms, key=len, reverse=True):
            text = text.replace(form, HIDDEN)
            if CUT in text:
                for size in range(len(form) - 1, 0, -1):
                    text = text.replace(form[:size] + CUT, HIDDEN + CUT)
        return text

    def hide_in(self, value: Any) -> Any:
        """A value of JSON without what is private in its texts."""
        if isinstance(value, dict):
            return {self.hide(name): self.hide_in(inner) for name, inner in value.items()}
        if isinstance(value, list):
            return [self.hide_in(inner) for inner in value]
        return self.hide(value) if isinstance(value, str) else value


def forms_of(value: str) -> set[str]:
    """How answers may write a text, before and after they are made printable: in an address, in JSON, in a page."""
    written = {
        value,
        quote(value),
        quote(value, safe=""),
        quote_plus(value),
        quote_plus(value, safe="/"),
        json.dumps(value)[1:-1],
        json.dumps(value, ensure_ascii=False)[1:-1],
        html.escape(value),
    }
    return {form for each in written for form in (each, printable(" ".join(each.split())))} - {""}


def address_of(url: str) -> Address:
    """The address that a user gave, with or without http://. Raises ValueError, whose message has nothing private."""
    given = url if "://" in url else f"http://{url}"
    try:
        parts = urlsplit(given)
        login, _, host = parts.netloc.rpartition("@")
        parts.port  # noqa: B018 (reading it checks it)
    except ValueError as error:
        raise ValueError(str(error) if "@" not in given else "not a host and a port") from None
    if not parts.hostname:
        raise ValueError("no host")
    if "@" in parts.path:  # of a login that ended at a `/`
        raise ValueError("in a login, `/` is written %2F, `?` %3F, `#` %23 and `@` %40")
    base = f"{parts.scheme}://{host}{parts.path}".rstrip("/")
    user, _, password = (unquote(part) for part in login.partition(":"))
    query = dict(parse_qsl(parts.query, keep_blank_values=True))
    private, headers = [*query.values()], {}
    if login:
        encoded = b64encode(f"{user}:{password}".encode()).decode()
        private += [password or user, encoded]
        headers["Authorization"] = f"Basic {encoded}"
    return Address(base if "://" in url else base.removeprefix("http://"), base, headers, query, tuple(private))


def shown(url: str) -> str:
    """The name of an address, also of one that is wrong."""
    try:
        return address_of(url).name
    except ValueError:
        scheme, mark, rest = url.rpartition("://")
        return scheme + mark + re.split("[?#]", rest.rpartition("@")[2])[0]


def without_logins(text: str) -> str:
    """A text in which addresses may stand, whose queries may be private, too."""
    return QUERY.sub(rf"\1{HIDDEN}", LOGIN.sub("", text))
