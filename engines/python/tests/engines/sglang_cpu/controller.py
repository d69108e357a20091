"""Drive SGLang's own HiCacheController over its own pools, without a server.

    controller.py SOCKET MODEL LAYOUT:IO_BACKEND:v1|pages …

Each case fills a device pool with random numbers, lets the controller write them
to the host pool and store them, empties the host pool, lets it find and load
them into the host pool and from there into other places of the device pool. One
line of JSON a case says what came of it.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from typing import Any

import shims
import torch

shims.install()

import torch.distributed as dist  # noqa: E402
from sglang.srt import runtime_context  # noqa: E402
from sglang.srt.distributed.parallel_state import (  # noqa: E402
    init_distributed_environment,
    initialize_model_parallel,
)
from sglang.srt.managers.cache_controller import HiCacheController  # noqa: E402
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator  # noqa: E402
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool  # noqa: E402
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost  # noqa: E402
from sglang.srt.mem_cache.utils import get_hash_str  # noqa: E402
from sglang.srt.server_args import ServerArgs  # noqa: E402

L, P, H, D = 4, 64, 2, 32
TOKENS, PAGES = 40 * P, 12
WAIT_S = 20.0


def start(model: str) -> Any:
    """Publish a server's arguments and make its groups of one; return the group."""
    args = ServerArgs(
        model_path=model,
        device="cpu",
        dtype="float32",
        page_size=P,
        skip_tokenizer_init=True,
        attention_backend="torch_native",
    )
    runtime_context.publish(args, role="scheduler", ranks=runtime_context.SpawnRanks(world_rank=0))
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1"}
    init_distributed_environment(
        world_size=1,
        rank=0,
        local_rank=0,
        backend="gloo",
        distributed_init_method=f"tcp://127.0.0.1:{port}",
    )
    initialize_model_parallel(backend="gloo")
    return dist.new_group([0], backend="gloo")


class Case:
    """One layout, one way between the pools, one of the two storage interfaces."""

    def __init__(self, group: Any, sidecar: str, layout: str, io: str, v1: bool) -> None:
        self.device = MHATokenToKVPool(
            size=TOKENS,
            page_size=P,
            dtype=torch.float32,
            head_num=H,
            head_dim=D,
            layer_num=L,
            device="cpu",
            enable_memory_saver=False,
        )
        self.slots = PagedTokenToKVPoolAllocator(
            TOKENS, P, torch.float32, "cpu", self.device, need_sort=False
        )
        self.host = MHATokenToKVPoolHost(
            self.device.get_device_pool_infos()[0].buffer_info,
            2.0,
            0,
            P,
            layout,
            pin_memory=False,
            device="cpu",
            device_capacity_tokens=self.device.size,
            start_layer=0,
            end_layer=L,
        )
        extra: dict[str, Any] = {
            "backend_name": "membrane",
            "module_path": "membrane_kv.sglang",
            "class_name": "MembraneHiCache",
            "sidecar": sidecar,
        }
        if v1:
            extra["interface_v1"] = 1
        self.controller = HiCacheController(
            self.slots,
            self.host,
            P,
            group,
            threading.Event(),
            write_policy="write_through",
            io_backend=io,
            storage_backend="dynamic",
            prefetch_threshold=P,
            model_name="m",
            storage_backend_extra_config=extra,
        )
        self.backend = self.controller.storage_backend

    def numbers(self, where: torch.Tensor) -> torch.Tensor:
        """Return what the device pool has at token slots."""
        d = self.device
        return torch.stack(
            [torch.stack((d.k_buffer[i][where], d.v_buffer[i][where])) for i in range(L)]
        )

    def prefetch(self, tokens: list[int], name: str) -> tuple[int, list[Any], torch.Tensor | None]:
        """Let the controller look for a prompt and load it; return hit, acks and host slots."""
        c = self.controller
        c.prefetch(name, tokens, None)
        op = c.prefetch_hit_queue.get(timeout=WAIT_S)
        if not op.storage_hit_count:
            return 0, [], None
        op.host_indices = c.alloc_prefetch_host_buffers(op, op.storage_hit_count)
        c.prefetch_buffer.put(op)
        acks: list[int] = []
        while True:
            ack = c.ack_prefetch_queue.get(timeout=WAIT_S)
            if ack.completed_req:
                return op.storage_hit_count, acks, op.host_indices
            acks.append(ack.completed_tokens)

    def run(self, seed: int) -> dict[str, Any]:
        """Store and load; return what is to be checked."""
        c, n = self.controller, PAGES * P
        up = self.backend._session.wait_up(_soon())
        tokens = [(seed * 1000 + i * i) % 30_000 for i in range(n)]
        at = self.slots.alloc(n)
        for layer in range(L):
            for pool in (self.device.k_buffer, self.device.v_buffer):
                pool[layer][at] = torch.randn(n, H, D)
        want = self.numbers(at)
        held = c.write(at, node_id=1)
        for ack in c.ack_write_queue:
            ack.finish_event.synchronize()
        hashes = get_hash_str(tokens, page_size=P)
        c.write_storage(held, tokens, hashes)
        stored = c.ack_backup_queue.get(timeout=WAIT_S).completed_tokens
        # Something else takes the first places, so that pages come back elsewhere.
        self.host.kv_buffer.zero_()
        c.evict_host(held)
        taken = self.host.alloc(3 * P)
        hit, acks, back = self.prefetch([*tokens, *range(P)], "first")
        equal = False
        if back is not None:
            into = c.load(back, node_id=2)
            c.start_loading()
            equal = bool(torch.equal(self.numbers(into), want))
            moved = not torch.equal(back, held)
        self.host.free(taken)
        counts = dict(self.backend.recorder.snapshot()["counts"])
        self.backend.clear()
        gone, _, _ = self.prefetch(tokens, "second")
        alive = all(
            t.is_alive() for t in (c.prefetch_thread, c.prefetch_io_aux_thread, c.backup_thread)
        )
        c.detach_storage_backend()
        return {
            "connected": up is not None,
            "interface": c.page_get_func.__name__,
            "stored": stored,
            "hit": hit,
            "acks": acks,
            "equal": equal,
            "moved": moved,
            "after_clear": gone,
            "threads": alive,
            "page_bytes": self.host.size_per_token * P,
            "counts": counts,
        }


def _soon() -> float:
    import time

    return time.monotonic() + WAIT_S


def main() -> None:
    """Run the cases that the command line names."""
    sidecar, model, *cases = sys.argv[1:]
    group = start(model)
    for seed, case in enumerate(cases, 1):
        layout, io, interface = case.split(":")
        c = Case(group, sidecar, layout, io, interface == "v1")
        interface = c.controller.page_get_func.__name__
        print(json.dumps({"case": case, **c.run(seed), "interface": interface}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
