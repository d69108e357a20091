"""Pages are announced once every rank has stored them, and taken back."""

from __future__ import annotations

import pytest
from membrane_kv import announce
from membrane_kv.announce import Announcer, Stored
from membrane_kv.jobs import StoreJob

BLOCK, PER = 32, 2
TOKENS = list(range(400))
HASHES = [f"h{i}" for i in range(12)]


def job(page: int = 0, pages: int = 1, request: str = "r") -> StoreJob:
    return StoreJob(request, 7, page, PER, list(range(pages * PER)), 0.0)


def page(number: int, about: str = "about") -> Stored:
    first = number * PER
    return Stored(
        tuple(HASHES[first : first + PER]),
        HASHES[first - 1] if first else None,
        tuple(TOKENS[number * 64 : number * 64 + 64]),
        about,
    )


def test_page_is_announced_once_every_rank_holds_it() -> None:
    a = Announcer(2, BLOCK, BLOCK)
    a.expect(job(1, 2), HASHES, TOKENS, "about")
    a.held({("r", 1): 1, ("r", 2): 2})
    assert list(a.take()) == [page(2)]
    a.held({("r", 1): 1})
    assert list(a.take()) == [page(1)]
    a.held({("r", 1): 2, ("other", 0): 2})
    assert list(a.take()) == []


def test_hashes_may_be_finer_than_blocks() -> None:
    a = Announcer(1, 16, BLOCK)
    hashes = [f"f{i}" for i in range(8)]
    a.expect(job(1), hashes, TOKENS, None)
    a.held({("r", 1): 1})
    (found,) = a.take()
    assert isinstance(found, Stored)
    assert (found.hashes, found.parent) == (("f4", "f5", "f6", "f7"), "f3")


@pytest.mark.parametrize("hash_tokens", [BLOCK, 48])
def test_page_without_hashes_is_not_announced(hash_tokens: int) -> None:
    a = Announcer(1, hash_tokens, BLOCK)
    a.expect(job(0), HASHES[:1], TOKENS, None)
    a.held({("r", 0): 1})
    assert list(a.take()) == []


def test_reset_takes_everything_back_and_late_stores_are_not_announced() -> None:
    a = Announcer(1, BLOCK, BLOCK)
    a.expect(job(0, 3), HASHES, TOKENS, "about")
    a.held({("r", 0): 1})
    assert list(a.take()) == [page(0)]
    a.held({("r", 1): 1})
    a.forget()
    a.held({("r", 2): 1})
    assert list(a.take()) == [("h0", "h1", "h2", "h3")]
    assert list(a.take()) == []


def test_another_connection_takes_everything_back() -> None:
    a = Announcer(1, BLOCK, BLOCK)
    a.connection(1)
    a.expect(job(0), HASHES, TOKENS, "about")
    a.held({("r", 0): 1})
    a.connection(1)
    assert list(a.take()) == [page(0)]
    a.connection(2)
    assert list(a.take()) == [("h0", "h1")]


def test_oldest_are_taken_back_when_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(announce, "_MAX_ANNOUNCED", 4)
    monkeypatch.setattr(announce, "_MAX_PENDING", 3)
    a = Announcer(1, BLOCK, BLOCK)
    a.expect(job(0, 4), HASHES, TOKENS, "about")
    for n in range(4):
        a.held({("r", n): 1})
    # Page 0 was no longer waited for; page 1 had to make room for page 3.
    assert list(a.take()) == [page(1), page(2), page(3), ("h2", "h3")]
