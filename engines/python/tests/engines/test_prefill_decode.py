"""Prefill in one vLLM, decode in another, behind one endpoint and the official client."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checks import page_bytes, quiet
from harness import PAGE, Cluster, Engine, engine_environment, eventually

TOKENS = 12
# Of a prompt that moves even if the engine does not tokenize in time: the guess
# from its bytes, a token in four, is above the threshold of 256 too.
LONG = 1200
OPTIONS = {
    "model": "m",
    "temperature": 0,
    "extra_body": {"ignore_eos": True, "return_token_ids": True},
}


class Client:
    """The official client, in the engine's environment."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [os.environ["MEMBRANE_VLLM_PYTHON"], str(Path(__file__).with_name("openai_client.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=engine_environment(),
            text=True,
        )

    def ask(self, port: int, kind: str, **body: Any) -> dict[str, Any]:
        """Send one request; an error fails."""
        assert self.process.stdin and self.process.stdout
        request = {"base": f"http://127.0.0.1:{port}/v1", "kind": kind, "body": OPTIONS | body}
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        assert "error" not in answer, answer
        return answer

    def close(self) -> None:
        """End it."""
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait(10)


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    c = Client()
    yield c
    c.close()


@pytest.fixture(scope="module", autouse=True)
def ready(cluster: Cluster) -> None:
    """Wait until both engines are attached and B knows A's serving port."""

    def attached() -> bool:
        return all([len(r) for r in s.ranks()] == [2] for s in (cluster.a, cluster.b))

    eventually(lambda: cluster.b.knows(cluster.a), "that the sidecars meet")
    eventually(attached, "that the engines are attached")


def text(cluster: Cluster, size: int) -> str:
    """Return a text that nobody has seen: a token a byte."""
    seed = cluster.fresh()
    words = (f"{seed}.{i * seed % 977} " for i in range(size))
    return "".join(words)[:size]


def disaggregated(cluster: Cluster) -> float:
    return float(cluster.b.metric('membrane_proxy_decisions_total{reason="disaggregated"}'))


def prompt_of(kind: str, prompt: str) -> dict[str, Any]:
    if kind == "completions":
        return {"prompt": prompt, "max_tokens": TOKENS}
    messages = [{"role": "system", "content": prompt}, {"role": "user", "content": "And then?"}]
    return {"messages": messages, "max_completion_tokens": TOKENS}


def computed(engine: Engine) -> float:
    return float(engine.metric("vllm:prompt_tokens_total"))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", ["completions", "chat"])
def test_prefilled_there_decoded_here(
    cluster: Cluster, client: Client, kind: str, stream: bool
) -> None:
    prompt = text(cluster, LONG)
    pages = LONG // PAGE
    body = prompt_of(kind, prompt)
    want = client.ask(cluster.plain.port, kind, **body)
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    before, on_a = disaggregated(cluster), computed(cluster.engine_a)
    moved = cluster.link.moved
    got = client.ask(cluster.serve_b, kind, **body, **options)
    assert got["tokens"] == want["tokens"]
    assert len(got["tokens"]) == TOKENS
    assert got["text"] == want["text"]
    assert got["finish"] == ["length"]
    assert (got["chunks"] > 2) == stream
    assert disaggregated(cluster) == before + 1
    assert computed(cluster.engine_a) - on_a >= LONG
    assert got["cached"] is not None
    assert got["cached"] >= pages * PAGE
    size = page_bytes(cluster.engine_b)
    assert pages * size < cluster.link.moved - moved < (pages + 2) * size + (64 << 10)
    # Again: all of it is here.
    moved = cluster.link.moved
    again = client.ask(cluster.serve_b, kind, **body, **options)
    assert again["tokens"] == want["tokens"]
    assert disaggregated(cluster) == before + 1
    assert cluster.link.moved - moved < size


def test_short_prompts_stay(cluster: Cluster, client: Client) -> None:
    body = prompt_of("completions", text(cluster, 200))
    before, on_a = disaggregated(cluster), computed(cluster.engine_a)
    want = client.ask(cluster.plain.port, "completions", **body)
    assert client.ask(cluster.serve_b, "completions", **body)["tokens"] == want["tokens"]
    assert disaggregated(cluster) == before
    assert computed(cluster.engine_a) == on_a


def test_salts_of_clients_do_not_share(cluster: Cluster, client: Client) -> None:
    body = prompt_of("completions", text(cluster, LONG))
    want = client.ask(cluster.plain.port, "completions", **body)
    before = disaggregated(cluster)
    for salt in ("one", "two"):
        extra = dict(OPTIONS["extra_body"], cache_salt=salt)  # type: ignore[call-overload]
        got = client.ask(cluster.serve_b, "completions", **body, extra_body=extra)
        assert got["tokens"] == want["tokens"]
    assert disaggregated(cluster) == before + 2


def test_prefill_pod_dies_meanwhile(cluster: Cluster, client: Client) -> None:
    body = prompt_of("completions", text(cluster, 3500))
    want = client.ask(cluster.plain.port, "completions", **body)
    failed = 'membrane_proxy_decisions_total{reason="prefill_failed"}'
    before = cluster.b.metric(failed)
    got: list[dict[str, Any]] = []
    thread = threading.Thread(
        target=lambda: got.append(
            client.ask(
                cluster.serve_b,
                "completions",
                **body,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
    )
    # The engine of A stands still, so that its prefill is under way for certain.
    os.kill(cluster.engine_a.pid, 19)
    try:
        thread.start()
        eventually(lambda: cluster.a.metric("membrane_proxy_in_flight") == 1, "the prefill on A")
        cluster.a.kill()
        thread.join(60)
    finally:
        os.kill(cluster.engine_a.pid, 18)
        cluster.a.start()
    assert got, "no answer"
    assert got[0]["tokens"] == want["tokens"]
    assert got[0]["finish"] == ["length"]
    assert cluster.b.metric(failed) == before + 1
    eventually(lambda: cluster.b.knows(cluster.a), "that the sidecars meet again")
    eventually(
        lambda: len(cluster.a.status()["engines"]["engines"]) == 1, "that A's engine is back"
    )
    quiet(cluster.engine_a)
