"""Send requests with the official client: reads JSON lines, writes an answer a line.

Runs in the engine's environment, which has the client. A request is
{"base", "kind": "completions"|"chat", "body"}; its answer has the token ids, the
text, how many chunks there were, and the cached tokens.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import openai


def collect(kind: str, chunks: Any) -> dict[str, Any]:
    """Read a stream, or an answer as a stream of one."""
    out: dict[str, Any] = {"tokens": [], "text": "", "chunks": 0, "finish": [], "cached": None}
    for chunk in chunks:
        v = chunk.model_dump()
        out["chunks"] += 1
        usage = v.get("usage")
        if usage:
            out["cached"] = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        for choice in v["choices"]:
            part = choice.get("delta") or choice.get("message") or {}
            out["text"] += (
                choice.get("text") if kind == "completions" else part.get("content")
            ) or ""
            out["tokens"] += choice.get("token_ids") or []
            if choice.get("finish_reason"):
                out["finish"].append(choice["finish_reason"])
    return out


def main() -> None:
    """Answer until the input ends."""
    for line in sys.stdin:
        request = json.loads(line)
        client = openai.OpenAI(base_url=request["base"], api_key="none", max_retries=0, timeout=120)
        api = client.completions if request["kind"] == "completions" else client.chat.completions
        try:
            answer = api.create(**request["body"])
            streamed = request["body"].get("stream")
            result = collect(request["kind"], answer if streamed else [answer])
        except openai.APIError as e:
            result = {"error": f"{type(e).__name__}: {e}"}
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
