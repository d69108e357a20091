"""Frames are cut from a stream wherever its pieces end."""

from __future__ import annotations

import random
import socket
import threading

import pytest
from membrane_kv import wire
from membrane_kv.frames import Frames
from membrane_kv.wire import Type


def test_pieces_of_every_length() -> None:
    rng = random.Random(1)
    bodies = [rng.randbytes(n) for n in (0, 1, 15, 4096, 0, 300_000, 7, 1_000_000, 3)]
    stream = b"".join(wire.frame(Type.RELEASE, i, b) for i, b in enumerate(bodies))
    ours, theirs = socket.socketpair()

    def send() -> None:
        at = 0
        while at < len(stream):
            at += theirs.send(stream[at : at + rng.choice((1, 15, 16, 17, 5000, 50_000))])
        theirs.close()

    sender = threading.Thread(target=send)
    sender.start()
    cut = Frames()
    got: list[tuple[wire.Header, bytes]] = []
    with ours, pytest.raises(ConnectionError, match="closed"):
        while True:
            cut.receive(ours)
            got += cut.frames()
    sender.join()
    assert [body for _, body in got] == bodies
    assert [header.id for header, _ in got] == list(range(len(bodies)))


def test_a_bad_header_is_an_error() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        cut = Frames()
        theirs.send(b"HTTP/1.1 400 Bad Request\r\n")
        cut.receive(ours)
        with pytest.raises(wire.WireError, match="magic"):
            cut.frames()
