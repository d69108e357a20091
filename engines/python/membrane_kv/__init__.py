"""Connectors that join inference engines to their membrane sidecar, and the client they use.

Thin by intent: geometry and lifecycle. Hashing, policy and checks are the
sidecar's. `membrane_kv.vllm`, `.sglang` and `.trtllm` are imported by their
engines; the rest needs numpy only.
"""

from .client import Client, endpoints
from .session import Session
from .weights import weights_id

__all__ = ["Client", "Session", "endpoints", "weights_id"]
