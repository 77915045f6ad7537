"""Listings of a gs:// store against a service that does not end them, or describes what cannot be."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from ckptmirror.core.errors import StorePermanent, StoreTemporary
from ckptmirror.stores import gs
from tests.kit.servers.hostile_server import MIB, Asked, answer, hostile_server
from tests.unit.stores.test_gs_hostile_answers import store_on


def item(name: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, "size": "1", "generation": "5", "crc32c": "AAAAAA==", **fields}


def page(items: Any, token: Any = None) -> bytes:
    return answer(200, json.dumps({"items": items} | ({"nextPageToken": token} if token is not None else {})).encode())


def pages(*answers: bytes) -> Iterator[bytes]:
    """The answers, and the last one for ever."""
    return itertools.chain(answers, itertools.repeat(answers[-1]))


@pytest.mark.parametrize(
    "answers",
    [
        pages(page([], "t")),
        pages(page([item("p/a")], "t")),
        (page([item("p/a"), item(f"p/b{number % 2}")], f"t{number}") for number in itertools.count()),
        (page([item(f"p/{9 - number % 10}")], f"t{number}") for number in itertools.count()),
    ],
    ids=["empty", "the same page", "two pages in turn", "backwards"],
)
def test_a_listing_that_does_not_move_on_ends(answers: Iterator[bytes]) -> None:
    with hostile_server(lambda _asked: [next(answers)]) as server:
        with pytest.raises(StoreTemporary):
            list(store_on(server).list())
        assert len(server.asked) <= gs._EMPTY_PAGES_LIMIT + 2


def test_a_listing_that_moves_on_for_ever_ends_at_its_last_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gs, "_PAGES_LIMIT", 20)
    numbers = itertools.count()
    with hostile_server(lambda _asked: [page([item(f"p/{next(numbers):05d}")], "t")]) as server:
        with pytest.raises(StorePermanent, match="more than 20 pages"):
            list(store_on(server).list())
        assert len(server.asked) == 20


def test_pages_without_an_object_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gs, "_EMPTY_PAGES_LIMIT", 3)
    empty = [page([], "t")] * 3
    answers = iter([*empty, page([item("p/a")], "t"), *empty, page([item("p/b")], "t"), page([])])
    with hostile_server(lambda _asked: [next(answers)]) as server:
        assert [info.name for info in store_on(server).list()] == ["a", "b"]


@pytest.mark.parametrize(
    "answered",
    [
        page([item("other/x")]),
        page([item("p")]),
        page([item("p/" + "n" * 1100)]),
        page([item("p/a", size="-1")]),
        page([item("p/a", metadata={"a": {"b": "c"}})]),
        page(["p/a"]),
        page([None]),
        page([[item("p/a")]]),
        page({"p/a": item("p/a")}),
        page("p/a"),
        page(5),
        page([item("p/a")], 5),
        page([item("p/a")], ["t"]),
        page([item("p/a")], "t" * 10_000),
    ],
)
def test_a_page_with_what_cannot_be_listed_is_one_error(answered: bytes) -> None:
    with hostile_server(lambda _asked: [answered]) as server:
        with pytest.raises(StoreTemporary) as caught:
            list(store_on(server).list())
        assert len(str(caught.value)) < 3000
        assert len(server.asked) == 1


def test_a_page_that_is_too_large_is_asked_for_in_smaller_ones() -> None:
    """Whoever may write to the bucket gives his objects the longest names and metadata: a listing must still pass."""
    objects = [item(f"p/{number:04d}{('/' + '<' * 240) * 4}", metadata={"a": "<" * 8000}) for number in range(1000)]

    def script(asked: Asked) -> list[bytes]:
        query = parse_qs(urlsplit(asked.target).query)
        begin, count = int(query.get("pageToken", ["0"])[0]), int(query["maxResults"][0])
        items = json.dumps(objects[begin : begin + count]).replace("<", "\\u003c")  # as the service writes it
        more = f', "nextPageToken": "{begin + count}"' if begin + count < len(objects) else ""
        return [answer(200, f'{{"items": {items}{more}}}'.encode())]

    with hostile_server(script) as server:
        assert [info.name[:4] for info in store_on(server).list()] == [f"{number:04d}" for number in range(1000)]
        assert len(server.asked) == 11


def test_a_page_of_empty_brackets_takes_little_memory() -> None:
    body = b'{"items":[' + b"[]," * (7 * MIB // 3) + b"[]]}"
    with hostile_server(lambda _asked: [answer(200, body)]) as server, pytest.raises(StoreTemporary, match="too many"):
        list(store_on(server).list())
