"""An engine's host pool as pages of bytes, and the copies in and out of it.

Needs no engine: what a host pool is, here, is a buffer in this process's memory
with a layout's name and sizes.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from .shared import Bytes

Index = npt.NDArray[np.int64]

LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")
"""SGLang's names of the orders that a host pool may have."""


class Pages(Protocol):
    """Where pages of one size lie in the engine's memory, by their index."""

    page_bytes: int

    def fill(self, index: Index, memory: Bytes, offsets: Index) -> None:
        """Copy the objects that begin at `offsets` of `memory` into pages."""

    def take(self, index: Index, memory: Bytes, offsets: Index) -> None:
        """Copy pages to where `offsets` of `memory` say."""


def as_bytes(tensor: Any) -> Bytes:
    """Return a tensor in main memory as bytes [bytes], not copied.

    The view does not keep the tensor. Raises ValueError for a tensor that does
    not lie in one piece in this process's memory.
    """
    if getattr(tensor.device, "type", "cpu") != "cpu":
        raise ValueError(f"a tensor on {tensor.device}, not in main memory")
    if not tensor.is_contiguous():
        raise ValueError("a tensor that does not lie in one piece")
    size = tensor.numel() * tensor.element_size()
    memory = (ctypes.c_uint8 * size).from_address(tensor.data_ptr())
    return np.frombuffer(memory, np.uint8)


def pool_pages(buffer: Any, layout: str, page_tokens: int, layers: int, mla: bool) -> Bytes:
    """Return a host pool's buffer as [pages, pieces…, bytes of a piece], not copied.

    A page read in this order is an object: K then V (with MLA there is one of
    both), and within each what `layout` has, `layer_first` as
    `page_first_direct`. Shapes of the buffer, in elements (T tokens, N = T / P
    pages of P, L layers, H heads, D dim):

        layer_first        [2, L, T, H, D]
        page_first         [2, T, L, H, D]
        page_first_direct  [2, N, L, P, H, D]
        page_head          [2, N, H, P, L, D]

    and without the 2 for MLA. Raises ValueError for other shapes.
    """
    if layout not in LAYOUTS or (mla and layout == "page_head"):
        raise ValueError(f"the host pool's layout is {layout}, one of {', '.join(LAYOUTS)} is read")
    shape = tuple(buffer.shape)
    kinds = () if mla else (2,)
    rest = shape[len(kinds) :]
    wanted = {
        "layer_first": rest[:1] == (layers,) and rest[1:2] and rest[1] % page_tokens == 0,
        "page_first": rest[1:2] == (layers,) and rest[0] % page_tokens == 0,
        "page_first_direct": rest[1:3] == (layers, page_tokens),
        "page_head": rest[2:4] == (page_tokens, layers),
    }[layout]
    if shape[: len(kinds)] != kinds or len(rest) < 3 or not wanted:
        raise ValueError(
            f"the host pool's buffer has the shape {shape} and its layout is {layout}, with"
            f" {layers} layers and {page_tokens} tokens in a page"
        )
    flat = as_bytes(buffer)
    if layout == "layer_first":
        pages = rest[1] // page_tokens
        view = flat.reshape(*kinds, layers, pages, -1)
    else:
        pages = rest[0] // page_tokens if layout == "page_first" else rest[0]
        view = flat.reshape(*kinds, pages, -1)
    return np.moveaxis(view, -2, 0)


class HostPool:
    """The pages of a host pool: `pages` has shape [pages, pieces…, bytes of a piece]."""

    def __init__(self, pages: Bytes) -> None:
        self._pages = pages
        self.count = pages.shape[0]
        self.page_bytes = math.prod(pages.shape[1:])

    def fill(self, index: Index, memory: Bytes, offsets: Index) -> None:
        """See Pages. One strided copy for every run of pages at equal distances."""
        for into, source in self._runs(index, memory, offsets):
            into[...] = source

    def take(self, index: Index, memory: Bytes, offsets: Index) -> None:
        """See Pages. One strided copy for every run of pages at equal distances."""
        for source, into in self._runs(index, memory, offsets):
            into[...] = source

    def _runs(self, index: Index, memory: Bytes, offsets: Index) -> Iterator[tuple[Bytes, Bytes]]:
        """Yield views of runs: pages and their objects, both [pages, pieces…, bytes]."""
        self._check(index, memory, offsets)
        piece = self._pages.shape[1:]
        inner = tuple(math.prod(piece[i + 1 :]) for i in range(len(piece)))
        for begin, end in runs(index, offsets):
            n, first, at = end - begin, int(index[begin]), int(offsets[begin])
            step = int(index[begin + 1]) - first if n > 1 else 1
            stride = int(offsets[begin + 1]) - at if n > 1 else self.page_bytes
            yield (
                _strided(self._pages[first], n, step * self._pages.strides[0]),
                np.lib.stride_tricks.as_strided(memory[at:], (n, *piece), (stride, *inner)),
            )

    def _check(self, index: Index, memory: Bytes, offsets: Index) -> None:
        if len(index) != len(offsets):
            raise ValueError(f"{len(index)} pages for {len(offsets)} objects")
        if not len(index):
            return
        if index.min() < 0 or index.max() >= self.count:
            raise ValueError(f"pages {index.min()} to {index.max()} of a pool of {self.count}")
        _check_offsets(offsets, self.page_bytes, memory)


def _check_offsets(offsets: Index, page_bytes: int, memory: Bytes) -> None:
    if len(offsets) and (offsets.min() < 0 or int(offsets.max()) + page_bytes > len(memory)):
        raise ValueError(
            f"objects of {page_bytes} bytes at {offsets.min()} to {offsets.max()} do not"
            f" lie in {len(memory)} bytes"
        )


def _strided(first: Bytes, n: int, stride: int) -> Bytes:
    return np.lib.stride_tricks.as_strided(first, (n, *first.shape), (stride, *first.strides))


def runs(index: Index, offsets: Index) -> Iterator[tuple[int, int]]:
    """Yield [begin, end) of the longest runs in which both grow by equal steps."""
    steps = np.stack((np.diff(index), np.diff(offsets)))
    # change[i]: the step from i + 1 on is another than that to it.
    change = (steps[:, 1:] != steps[:, :-1]).any(axis=0)
    turns = (np.flatnonzero(change) + 1).tolist()
    begin, n, k = 0, len(index), 0
    while begin < n:
        while k < len(turns) and turns[k] <= begin:
            k += 1
        end = turns[k] + 1 if k < len(turns) else n
        yield begin, end
        begin = end


class FlatPages:
    """Pages that are each an array of their own, in the order of the index."""

    def __init__(self, pages: Sequence[Bytes], page_bytes: int) -> None:
        for page in pages:
            if page.shape != (page_bytes,):
                raise ValueError(f"a page of {page.nbytes} bytes, not {page_bytes}")
        self._pages = pages
        self.page_bytes = page_bytes

    def fill(self, index: Index, memory: Bytes, offsets: Index) -> None:
        """See Pages."""
        _check_offsets(offsets, self.page_bytes, memory)
        for i, at in zip(index.tolist(), offsets.tolist(), strict=True):
            self._pages[i][:] = memory[at : at + self.page_bytes]

    def take(self, index: Index, memory: Bytes, offsets: Index) -> None:
        """See Pages."""
        _check_offsets(offsets, self.page_bytes, memory)
        for i, at in zip(index.tolist(), offsets.tolist(), strict=True):
            memory[at : at + self.page_bytes] = self._pages[i]
