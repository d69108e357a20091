#!/usr/bin/env bash
# Usage: run.sh [pytest arguments]
#
# Installs the pinned engines (once, outside the checkout) and runs them with
# real sidecars. Fails, and never skips, when something cannot be had.
#
# MEMBRANE_BIN             the binary to test; built when not set
# MEMBRANE_VLLM_PYTHON     an interpreter that has vLLM, instead of installing it
# MEMBRANE_SGLANG_PYTHON   an interpreter that has SGLang, likewise
# MEMBRANE_LMCACHE_PYTHON  one that has LMCache, pytest and torch, likewise
# MEMBRANE_TEST_PYTHON     an interpreter that has pytest and numpy, likewise
# MEMBRANE_TEST_LOGS       where logs go; build/test-engines when not set
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../../../.." && pwd)

if [[ -z ${MEMBRANE_VLLM_PYTHON:-} ]]; then
	venv=$("$root/.ci/venv.sh" vllm "$here/requirements.txt" "$here/overrides.txt")
	MEMBRANE_VLLM_PYTHON=$venv/bin/python
fi
if [[ -z ${MEMBRANE_SGLANG_PYTHON:-} ]]; then
	venv=$("$root/.ci/venv.sh" sglang "$here/sglang-requirements.txt" "$here/sglang-overrides.txt")
	MEMBRANE_SGLANG_PYTHON=$venv/bin/python
fi
if [[ -z ${MEMBRANE_LMCACHE_PYTHON:-} ]]; then
	venv=$("$root/.ci/venv.sh" lmcache "$root/bench/python/lmcache-requirements.txt" "$here/overrides.txt")
	MEMBRANE_LMCACHE_PYTHON=$venv/bin/python
fi
if [[ -z ${MEMBRANE_TEST_PYTHON:-} ]]; then
	venv=$("$root/.ci/venv.sh" tools "$root/tools/python-requirements.txt")
	MEMBRANE_TEST_PYTHON=$venv/bin/python
fi
if [[ -z ${MEMBRANE_BIN:-} ]]; then
	make -C "$root" build
	MEMBRANE_BIN=$root/bin/membrane
fi
export MEMBRANE_BIN MEMBRANE_VLLM_PYTHON MEMBRANE_SGLANG_PYTHON MEMBRANE_LMCACHE_PYTHON
export MEMBRANE_TEST_LOGS=${MEMBRANE_TEST_LOGS:-$root/build/test-engines}

# Tests of all runs add their rows; each run prints what there is.
MEMBRANE_TEST_MATRIX=$(mktemp)
export MEMBRANE_TEST_MATRIX
trap 'rm -f "$MEMBRANE_TEST_MATRIX"' EXIT

cd "$here/../.."
run() { "$MEMBRANE_TEST_PYTHON" -m pytest -p no:cacheprovider -rA --durations=0 "$@"; }
if [[ $# -gt 0 ]]; then
	run "$@"
	exit
fi
# One engine after the other: all servers at a time need more memory than a small
# machine has. The last run has one of each.
code=0
run --ignore-glob='*test_sglang_*' --ignore-glob='*test_cross_engine.py' tests/engines || code=$?
MEMBRANE_TEST_LOGS=$MEMBRANE_TEST_LOGS/sglang run tests/engines/test_sglang_*.py || code=$?
MEMBRANE_TEST_LOGS=$MEMBRANE_TEST_LOGS/cross run tests/engines/test_cross_engine.py || code=$?
exit "$code"
