"""Host pools as pages: the order of an object's bytes, and copies by runs."""

from __future__ import annotations

import numpy as np
import pytest
import sglang_standin as standin
from membrane_kv.hostpool import FlatPages, HostPool, as_bytes, pool_pages, runs
from sglang_standin import LAYOUTS, MHATokenToKVPoolHost, MLATokenToKVPoolHost, Tensor


def pages(pool: MHATokenToKVPoolHost | MLATokenToKVPoolHost) -> HostPool:
    mla = isinstance(pool, MLATokenToKVPoolHost)
    return HostPool(pool_pages(pool.kv_buffer, pool.layout, standin.P, standin.L, mla))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_object_is_what_sglang_calls_a_data_page(layout: str) -> None:
    pool = MHATokenToKVPoolHost(layout, 1)
    host = pages(pool)
    assert (host.count, host.page_bytes) == (standin.N, standin.PAGE_BYTES)
    memory = np.zeros(2 * host.page_bytes, np.uint8)
    host.take(np.array([5, 2]), memory, np.array([0, host.page_bytes]))
    for i, page in enumerate((5, 2)):
        got = memory[i * host.page_bytes : (i + 1) * host.page_bytes]
        assert bytes(got) == pool.get_data_page(page * standin.P).array.tobytes()


@pytest.mark.parametrize("layout", LAYOUTS[:3])
def test_latents(layout: str) -> None:
    pool = MLATokenToKVPoolHost(layout, 1)
    host = pages(pool)
    memory = np.zeros(host.page_bytes, np.uint8)
    host.take(np.array([7]), memory, np.array([0]))
    a, first = pool.kv_buffer.array, 7 * standin.P
    want = {
        "layer_first": lambda: a[:, first : first + standin.P],
        "page_first": lambda: a[first : first + standin.P],
        "page_first_direct": lambda: a[7],
    }[layout]()
    assert bytes(memory) == np.ascontiguousarray(want).tobytes()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seed", range(5))
def test_there_and_back_at_any_places(layout: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    source, target = (
        pages(a := MHATokenToKVPoolHost(layout, 3)),
        pages(b := MHATokenToKVPoolHost(layout)),
    )
    n = int(rng.integers(1, standin.N))
    start = np.arange(n) if seed == 0 else rng.permutation(standin.N)[:n]
    end = np.arange(n)[::-1].copy() if seed == 1 else rng.permutation(standin.N)[:n]
    where = rng.permutation(standin.N)[:n] * (source.page_bytes + 64)
    memory = np.zeros(standin.N * (source.page_bytes + 64), np.uint8)
    source.take(start, memory, where)
    target.fill(end, memory, where)
    assert (b.truth()[:, end] == a.truth()[:, start]).all()
    rest = np.setdiff1d(np.arange(standin.N), end)
    assert not b.truth()[:, rest].any(), "a page that nobody asked for was written"


@pytest.mark.parametrize(
    ("index", "offsets", "want"),
    [
        ([], [], []),
        ([4], [9], [(0, 1)]),
        ([0, 1, 2, 3], [0, 8, 16, 24], [(0, 4)]),
        ([3, 2, 1], [0, 8, 16], [(0, 3)]),
        ([0, 1, 2, 10, 11], [0, 8, 16, 24, 32], [(0, 3), (3, 5)]),
        ([0, 1, 2, 3], [0, 8, 40, 48], [(0, 2), (2, 4)]),
        ([0, 5, 6, 2], [0, 8, 16, 24], [(0, 2), (2, 4)]),
    ],
)
def test_runs(index: list[int], offsets: list[int], want: list[tuple[int, int]]) -> None:
    assert list(runs(np.array(index, np.int64), np.array(offsets, np.int64))) == want


def test_one_copy_for_a_batch_in_a_row() -> None:
    host = pages(MHATokenToKVPoolHost("page_first_direct", 1))
    made = list(
        host._runs(
            np.arange(8, 24),
            np.zeros(40 * host.page_bytes, np.uint8),
            np.arange(16) * host.page_bytes,
        )
    )
    assert len(made) == 1


def test_outside_of_pool_or_memory_is_refused() -> None:
    host = pages(MHATokenToKVPoolHost("page_first"))
    memory = np.zeros(2 * host.page_bytes, np.uint8)
    host.fill(np.array([standin.N - 1]), memory, np.array([host.page_bytes]))
    for index, offset in ((standin.N, 0), (-1, 0), (0, host.page_bytes + 1), (0, -1)):
        with pytest.raises(ValueError, match=r"pool of|do not lie"):
            host.fill(np.array([index]), memory, np.array([offset]))
    with pytest.raises(ValueError, match="2 pages for 1 objects"):
        host.take(np.array([0, 1]), memory, np.array([0]))


@pytest.mark.parametrize(
    ("layout", "shape"),
    [
        ("page_first_direct", (2, 4, 3, 8, 2, 8)),
        ("page_first_direct", (1, 4, 3, 16, 2, 8)),
        ("page_head", (2, 4, 2, 3, 16, 8)),
        ("page_first", (2, 3, 64, 2, 8)),
        ("page_first", (2, 60, 3, 2, 8)),
        ("layer_first", (2, 64, 3, 2, 8)),
        ("layer_first", (2, 3)),
        ("page_unified", (4, 1, 3, 2, 16, 2, 8)),
    ],
)
def test_other_shapes_are_refused(layout: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="the host pool's"):
        pool_pages(Tensor(np.zeros(shape, np.float32)), layout, 16, 3, False)


def test_memory_that_cannot_be_read_is_refused() -> None:
    whole = np.arange(12, dtype=np.float32)
    assert bytes(as_bytes(Tensor(whole))) == whole.tobytes()
    with pytest.raises(ValueError, match="one piece"):
        as_bytes(Tensor(whole[::2]))
    far = Tensor(whole)
    far.device.type = "cuda"
    with pytest.raises(ValueError, match="main memory"):
        as_bytes(far)
    with pytest.raises(ValueError, match="a page of 48 bytes, not 40"):
        FlatPages([as_bytes(Tensor(whole))], 40)


@pytest.mark.parametrize("offset", [-standin.PAGE_BYTES, -1, 1, 2 * standin.PAGE_BYTES - 1, 2**40])
def test_page_of_its_own_is_copied_from_inside_the_memory_only(offset: int) -> None:
    """A slice that is too short, of one byte even, must not be spread over the page."""
    memory = np.arange(2 * standin.PAGE_BYTES, dtype=np.uint64).astype(np.uint8)
    page = np.zeros(standin.PAGE_BYTES, np.uint8)
    flat = FlatPages([page], standin.PAGE_BYTES)
    at = np.array([offset], np.int64)
    if offset == 1:
        flat.fill(np.array([0]), memory, at)
        assert (page == memory[1 : 1 + standin.PAGE_BYTES]).all()
        return
    before = memory.copy()
    with pytest.raises(ValueError, match="do not lie in"):
        flat.fill(np.array([0]), memory, at)
    with pytest.raises(ValueError, match="do not lie in"):
        flat.take(np.array([0]), memory, at)
    assert not page.any() and (memory == before).all()
