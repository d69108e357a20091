"""Run an SGLang server on CPU: serve.py FLAGS of sglang.launch_server.

The processes that the server starts import this file again before they begin,
which gives them the same shims.
"""

import os
import sys

import shims

shims.install()

if __name__ == "__main__":
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    try:
        run_server(prepare_server_args(sys.argv[1:]))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
