"""Addresses of servers. What is private in one, its login or token and its query (``?token=``), goes into requests and
nowhere else: not into files, messages or logs."""

import html
import json
import re
from base64 import b64encode
from dataclasses import dataclass, field
from urllib.parse import quote, quote_plus

from yarl import URL

LOGIN = re.compile(r"(?<=://)(?!USER:PASSWORD@)[^/?#\s]*@")  # these words stand for one, in advice
QUERY = re.compile(r"(://[^\s?#]*\?)[^\s'\"]+")
IN_LOGIN = re.compile("[/?#].*@", re.DOTALL)
HIDDEN = "***"


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
        """The text of a server, which may repeat what it was asked with: plain, in an address, in JSON, in a page."""
        forms = set()
        for value in filter(None, self.private):
            forms |= {value, quote(value), quote(value, safe=""), quote_plus(value), quote_plus(value, safe="/")}
            forms |= {json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1], html.escape(value)}
        for form in sorted(forms, key=len, reverse=True):
            text = text.replace(form, HIDDEN)
        return text


def address_of(url: str, token: str = "") -> Address:
    """The address that a user gave, with or without http://. token: what its requests are signed with, unless it has a
    login. Raises ValueError, whose message has nothing private."""
    if IN_LOGIN.search(url.partition("://")[2] or url):  # the login ended there
        raise ValueError("in a login, `/` is written %2F, `?` %3F, `#` %23 and `@` %40")
    try:
        given = URL(url if "://" in url else f"http://{url}")
    except ValueError as error:
        raise ValueError("not a host and a port" if "@" in url else str(error)) from None
    if given.scheme not in ("http", "https"):
        raise ValueError("no http:// or https:// in front")
    if not given.host:
        raise ValueError("no host")
    query = dict(given.query)
    private, headers = [*query.values()], {}
    if given.user is not None or given.password is not None:
        encoded = b64encode(f"{given.user or ''}:{given.password or ''}".encode()).decode()
        private += [given.password or given.user or "", encoded]
        headers["Authorization"] = f"Basic {encoded}"
    elif token:
        private.append(token)
        headers["Authorization"] = f"Bearer {token}"
    base = str(given.with_user(None).with_query(None).with_fragment(None)).rstrip("/")
    return Address(hide_private(url).rstrip("/"), base, headers, query, tuple(private))


def hide_private(url: str) -> str:
    """An address, which may be wrong, without what is private in it."""
    scheme, mark, rest = url.rpartition("://")
    return scheme + mark + re.split("[?#]", rest.rpartition("@")[2])[0]


def without_logins(text: str) -> str:
    """A text in which addresses may stand, whose queries may be private, too."""
    return QUERY.sub(rf"\1{HIDDEN}", LOGIN.sub("", text))
