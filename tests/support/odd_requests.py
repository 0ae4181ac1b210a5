"""Requests that no client of ours sends, for whichever routes a server has."""

from __future__ import annotations

import http.client
import json
import re
import urllib.parse
from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import strategies as st

from support.waiting import DEADLINE_S

DEEP = b"[" * 200_000 + b"]" * 200_000
ODD_TEXTS = st.one_of(
    st.text(st.characters(codec=None), max_size=40),
    st.sampled_from(["", "\0", "a\0b", "..", "../../etc/passwd", "/", "\ud800", "é", "%00", "%zz", "x" * 5000]),
    st.sampled_from(["0", "-1", "1" * 5000, "1e400", "NaN", "١", "train", "a\nb"]),
)
ODD_VALUES = st.recursive(
    st.one_of(ODD_TEXTS, st.none(), st.booleans(), st.integers(), st.floats(), st.just(10**400), st.just(-1)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(ODD_TEXTS, inner, max_size=3)),
    max_leaves=8,
)
ODD_HEADERS = st.sampled_from(
    [
        {},
        {"Content-Type": "application/json; charset=utf-7"},
        {"Content-Type": "multipart/form-data"},
        {"Content-Type": "multipart/form-data; boundary="},
        {"Content-Type": "multipart/form-data; boundary=" + "b" * 100},
        {"Content-Type": "multipart/mixed; boundary=b"},
        {"Content-Encoding": "gzip"},
        {"Content-Encoding": "nonsense"},
        {"Expect": "miracles"},
        {"Cookie": "a=" + "b" * 9000},
        {"Range": "bytes=9-1"},
        {"Idempotency-Key": "k" * 8000},
        {"Upgrade": "websocket", "Connection": "Upgrade"},
    ]
)


@dataclass(frozen=True)
class OddRequest:
    method: str
    path: str
    body: bytes
    headers: dict[str, str]


@st.composite
def odd_requests(draw, routes: Sequence[tuple[str, str]], keys: Sequence[str], queries: Sequence[str] = ()):
    """A request to one of ``routes`` (method, path with ``{places}``) whose body has some of the ``keys``."""
    method, template = draw(st.sampled_from(routes))
    path = re.sub(r"\{\w+\}", lambda _: _quoted(draw(ODD_TEXTS)), template)
    asked = draw(st.dictionaries(st.sampled_from([*queries, "x"]), ODD_TEXTS, max_size=2))
    if asked:
        path += "?" + "&".join(f"{name}={_quoted(value)}" for name, value in asked.items())
    body = draw(
        st.one_of(
            st.dictionaries(st.sampled_from(keys), ODD_VALUES, max_size=5).map(
                lambda value: json.dumps(value).encode()
            ),
            ODD_VALUES.map(json.dumps).map(str.encode),
            st.binary(max_size=60),
            st.sampled_from([DEEP, b"", b"--b\r\n", b"--b\r\nContent-Disposition: form-data; name=canary\r\n\r\n\xff"]),
        )
    )
    return OddRequest(method, path[:8000], body, draw(ODD_HEADERS))


def _quoted(text: str) -> str:
    return urllib.parse.quote(text, safe="", errors="surrogatepass")


def ask(url: str, token: str, odd: OddRequest) -> tuple[int, bytes]:
    """Status and body of the answer."""
    parts = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=DEADLINE_S)
    try:
        connection.request(odd.method, odd.path, odd.body, {"Authorization": f"Bearer {token}", **odd.headers})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def check_answer(status: int, body: bytes, *hidden: str) -> None:
    """An answer is an answer or a refusal in one line of JSON, and holds nothing of ``hidden``."""
    assert status < 500, (status, body)
    if status != 204:
        assert b"\n" not in body, body
        told = json.loads(body)
        if status >= 400:
            assert isinstance(told, dict), body
            assert isinstance(told.get("error", told.get("detail")), str | dict), body
    for text in hidden:
        assert text.encode() not in body, body
