"""A stock Python client of transfer.proto, as a user would write it.

python client.py HOST:PORT of a prefill node, HOST:PORT of a decode node, KEY.
Generates its code from the .proto with grpcio-tools and prints the tokens as
JSON. It fails where an answer is not what docs/prefill-decode.md says.
"""

from __future__ import annotations

import json
import pathlib
import sys
import tempfile

import grpc
from grpc_tools import protoc


def generate() -> None:
    source = pathlib.Path(__file__).parent.parent / "transferpb"
    out = tempfile.mkdtemp()
    status = protoc.main(
        ["protoc", f"-I{source}", f"--python_out={out}", f"--grpc_python_out={out}", "transfer.proto"]
    )
    if status != 0:
        raise SystemExit("cannot generate the client")
    sys.path.insert(0, out)


def expect(code: grpc.StatusCode, call: object) -> None:
    try:
        call()  # type: ignore[operator]
    except grpc.RpcError as error:
        assert error.code() == code, error
        return
    raise AssertionError(f"{code} was expected")


def main(prefill: str, decode: str, key: str) -> None:
    generate()
    import transfer_pb2 as pb
    import transfer_pb2_grpc

    prefill_node = transfer_pb2_grpc.TransferStub(grpc.insecure_channel(prefill))
    decode_node = transfer_pb2_grpc.TransferStub(grpc.insecure_channel(decode))
    who = {"metadata": [("authorization", f"Bearer {key}")], "timeout": 30}

    prompt = pb.PrefillRequest(request_id="r1", model_id="llama-3-8b", token_ids=range(1, 301))
    done = prefill_node.Prefill(prompt, **who)
    assert done.request_id == "r1" and done.prompt_len == 300, done
    batch = prefill_node.BatchPrefill(pb.BatchPrefillRequest(requests=[prompt]), **who)
    assert batch.responses[0].kv_handle == done.kv_handle, batch
    assert batch.responses[0].cached_prefix_len == 300, batch

    ask = pb.DecodeRequest(
        request_id="r2", kv_handle=done.kv_handle, model_id="llama-3-8b", max_tokens=8
    )
    whole = decode_node.Decode(ask, **who)
    assert whole.finished and whole.recomputed_tokens == 0, whole
    events = list(decode_node.DecodeStream(ask, **who))
    assert [event.token_id for event in events[:-1]] == list(whole.token_ids), events
    assert events[-1].done.token_ids == whole.token_ids, events

    expect(grpc.StatusCode.UNAUTHENTICATED, lambda: prefill_node.Prefill(prompt, timeout=30))
    expect(grpc.StatusCode.FAILED_PRECONDITION, lambda: decode_node.Prefill(prompt, **who))
    expect(
        grpc.StatusCode.INVALID_ARGUMENT,
        lambda: prefill_node.Prefill(pb.PrefillRequest(request_id="r", model_id="m"), **who),
    )
    ask.kv_handle = "0" * 64
    expect(grpc.StatusCode.NOT_FOUND, lambda: decode_node.Decode(ask, **who))
    print(json.dumps(list(whole.token_ids)))


if __name__ == "__main__":
    main(*sys.argv[1:])
