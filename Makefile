SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --warn-undefined-variables --no-print-directory

# What `membrane version` says: the nearest tag, or "dev" outside a checkout.
VERSION := $(shell git describe --tags --always --dirty 2>/dev/null || echo dev)
# How long each fuzz target runs.
FUZZTIME ?= 10s
# The name of the image that `make image` builds.
IMAGE ?= membrane:$(VERSION)

# Version stamps come from VERSION, so that a checkout owned by somebody else
# builds too. Build, tools and linters share these flags and with them the
# build cache.
STATIC := CGO_ENABLED=0 GOFLAGS='-trimpath -buildvcs=false'
TOOL := go tool -modfile=tools/go.mod
# The race detector needs a C compiler. Every CI run has one.
CC ?= cc
RACE := $(if $(shell command -v $(CC)),-race,)
PYTOOLS := $(CURDIR)/.venv/tools/bin
PYTHON_DIR := engines/python
PROTO_DIR := sidecar/grpcapi/transferpb
BENCH_PYTHON_DIR := bench/python
# What is checked and formatted; the helper alone, since it is in no package.
BENCH_HELPER := bench/peers/helper.py
PYTHON_DIRS := $(PYTHON_DIR) $(BENCH_PYTHON_DIR)
# Print the interpreter of an environment with the pinned vLLM, or vLLM and
# LMCache, which is made once, outside the checkout.
ENGINE_PINS := $(PYTHON_DIR)/tests/engines
VLLM_PYTHON = $$(.ci/venv.sh vllm $(ENGINE_PINS)/requirements.txt $(ENGINE_PINS)/overrides.txt)/bin/python
LMCACHE_PYTHON = $$(.ci/venv.sh lmcache $(BENCH_PYTHON_DIR)/lmcache-requirements.txt $(ENGINE_PINS)/overrides.txt)/bin/python

.PHONY: help
help: ## Print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-17s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

.PHONY: build
build: ## Build bin/membrane, one static binary
	$(STATIC) go build -ldflags '-s -w -X main.version=$(VERSION)' -o bin/membrane ./cmd/membrane

.PHONY: demo
demo: build ## See KV computed by one engine served to another, on this machine
	bin/membrane demo

.PHONY: test
test: test-race test-plain test-python test-grpc ## Run every test that needs no engine

# What every run of the Go tests has in common.
GOTEST = MEMBRANE_BIN='$(CURDIR)/bin/membrane' GOFLAGS=-buildvcs=false \
	$$($(STATIC) $(TOOL) -n gotestsum) --format pkgname --format-hide-empty-pkg -- -shuffle=on -timeout 10m

.PHONY: test-race
test-race: build ## Run the Go tests with the race detector
	$(if $(RACE),,@echo 'no C compiler ($(CC)): testing without the race detector' >&2)
	$(GOTEST) $(RACE) ./...

# Tests that count allocations, heap or hits mean nothing under the race
# detector and skip themselves there; coverage is too slow beside it.
.PHONY: test-plain
test-plain: build ## Run the Go tests without it; write coverage.out
	$(GOTEST) -coverpkg=./... -coverprofile=coverage.out ./...

.PHONY: test-invariants
test-invariants: ## Switch off each guard of an invariant and see its test fail
	tools/invariants.sh

.PHONY: test-python
test-python: pytools build ## Run the Python unit tests of engines/python and bench/python
	cd $(PYTHON_DIR) && MEMBRANE_BIN='$(CURDIR)/bin/membrane' '$(PYTOOLS)/python' -m pytest -p no:cacheprovider --ignore=tests/engines tests
	cd $(BENCH_PYTHON_DIR) && PYTHONPATH=. '$(PYTOOLS)/python' -m pytest -p no:cacheprovider tests

.PHONY: test-grpc
test-grpc: build grpctools ## Drive the gRPC interface with a stock Python client
	MEMBRANE_GRPC_PYTHON='$(CURDIR)/.venv/grpc/bin/python' MEMBRANE_BIN='$(CURDIR)/bin/membrane' GOFLAGS=-buildvcs=false \
		go test -count=1 -run '^TestStockPythonClient$$' ./cmd/membrane

.PHONY: test-engines
test-engines: build ## Install the pinned engines and run them with the real sidecars
	MEMBRANE_BIN='$(CURDIR)/bin/membrane' $(PYTHON_DIR)/tests/engines/run.sh

# From a copy: setuptools leaves files behind where it builds. The wheel is then
# installed into an environment of its own, where it must import.
.PHONY: wheel
wheel: ## Build the wheel of engines/python in build/wheel
	rm -rf build/wheel && mkdir -p build/wheel/source
	cp -r $(PYTHON_DIR)/pyproject.toml $(PYTHON_DIR)/membrane_kv build/wheel/source
	find build/wheel/source -name __pycache__ -prune -exec rm -rf {} +
	python3 -m venv build/wheel/venv
	build/wheel/venv/bin/python -m pip wheel --quiet --no-deps --wheel-dir build/wheel build/wheel/source
	build/wheel/venv/bin/python -m pip install --quiet build/wheel/*.whl
	cd build/wheel && venv/bin/python -c 'import membrane_kv; print(membrane_kv.__file__)'
	rm -rf build/wheel/source build/wheel/venv

.PHONY: bench-core
bench-core: build ## Measure match, lease, read, store and peer fill
	bin/membrane bench core

# How many prompts vLLM is measured with, each in every way.
PROMPTS ?= 15
# Further flags of `membrane bench serve`.
SERVE_FLAGS ?=
# An interpreter that has torch and sees a GPU, and flags for what it runs.
PINNED_PYTHON ?= python3
PINNED_FLAGS ?=
# Where reports, plots and profiles go.
BENCH_OUT ?= build/bench
PROFILE_OUT ?= build/profiles
# Which packages and Go benchmarks `make profile` profiles.
PROFILE_PKGS ?= kvwire cache mesh sidecar/engineport
PROFILE_BENCH ?= .

.PHONY: bench-peers-setup
bench-peers-setup: ## Install the peers that bench-peers measures, as far as they can be had
	tools/peers/setup.sh

.PHONY: bench-peers
bench-peers: build ## Measure membrane beside its peers: 12 minutes, a quiet machine
	bin/membrane bench peers --out $(BENCH_OUT)
	$(STATIC) go run ./cmd/benchplot peers $(BENCH_OUT)/peers.json $(BENCH_OUT)

.PHONY: bench
bench: build bench-peers-setup ## Run all benchmarks and write their results into docs/benchmarks.md: 40 minutes
	mkdir -p $(BENCH_OUT)
	bin/membrane bench core --markdown >$(BENCH_OUT)/core.md
	bin/membrane bench capacity --markdown >$(BENCH_OUT)/capacity.md
	bin/membrane bench replay --out $(BENCH_OUT) >/dev/null
	bin/membrane bench peers --out $(BENCH_OUT) >/dev/null
	bin/membrane bench pd --out $(BENCH_OUT) >/dev/null
	vllm=$(VLLM_PYTHON); lmcache=$(LMCACHE_PYTHON) || lmcache=; \
	bin/membrane bench core --vllm-only --vllm="$$vllm" --connector=$(PYTHON_DIR) --lmcache="$$lmcache" --rounds=$(PROMPTS) --markdown >$(BENCH_OUT)/vllm.md
	vllm=$(VLLM_PYTHON); lmcache=$(LMCACHE_PYTHON) || lmcache=; \
	bin/membrane bench serve --vllm="$$vllm" --connector=$(PYTHON_DIR) --lmcache="$$lmcache" --markdown $(SERVE_FLAGS) >$(BENCH_OUT)/serve.md
	$(MAKE) bench-docs

.PHONY: bench-docs
bench-docs: ## Write what `make bench` has measured so far into docs/benchmarks.md
	for report in peers replay pd; do \
		if [[ -e $(BENCH_OUT)/$$report.json ]]; then $(STATIC) go run ./cmd/benchplot $$report $(BENCH_OUT)/$$report.json docs/plots; fi; \
	done
	tools/bench-docs.sh docs/benchmarks.md $(BENCH_OUT)

.PHONY: profile
profile: ## Profile the Go benchmarks of the hot paths: processor time and allocations
	@mkdir -p $(PROFILE_OUT); for pkg in $(PROFILE_PKGS); do \
		name=$${pkg//\//-}; \
		go test -run '^$$' -bench '$(PROFILE_BENCH)' -benchmem -cpuprofile $(PROFILE_OUT)/$$name.cpu.prof \
			-memprofile $(PROFILE_OUT)/$$name.mem.prof -o $(PROFILE_OUT)/$$name.test ./$$pkg | tee $(PROFILE_OUT)/$$name.txt; \
		go tool pprof -top -nodecount=10 $(PROFILE_OUT)/$$name.test $(PROFILE_OUT)/$$name.cpu.prof; \
		go tool pprof -top -nodecount=10 -sample_index=alloc_space $(PROFILE_OUT)/$$name.test $(PROFILE_OUT)/$$name.mem.prof; \
	done

.PHONY: bench-vllm
bench-vllm: build ## Measure the first token of the pinned vLLM, loaded and computed
	vllm=$(VLLM_PYTHON); lmcache=$(LMCACHE_PYTHON) || lmcache=; \
	bin/membrane bench core --vllm-only --vllm="$$vllm" --connector=$(PYTHON_DIR) --lmcache="$$lmcache" --rounds=$(PROMPTS)

.PHONY: bench-vllm-check
bench-vllm-check: build ## The same shortly; fail below tools/bench-vllm-floors.txt
	vllm=$(VLLM_PYTHON); bin/membrane bench core --vllm-only --vllm="$$vllm" --connector=$(PYTHON_DIR) --rounds=5 --floors tools/bench-vllm-floors.txt

.PHONY: bench-serve
bench-serve: build ## Load the pinned vLLM with each KV connector in turn, LMCache's too
	vllm=$(VLLM_PYTHON); lmcache=$(LMCACHE_PYTHON) || lmcache=; \
	bin/membrane bench serve --vllm="$$vllm" --connector=$(PYTHON_DIR) --lmcache="$$lmcache" $(SERVE_FLAGS)

.PHONY: bench-pd
bench-pd: build ## Measure prefill and decode on different nodes, and the hand-over
	bin/membrane bench pd --out $(BENCH_OUT)
	$(STATIC) go run ./cmd/benchplot pd $(BENCH_OUT)/pd.json $(BENCH_OUT)

.PHONY: bench-pinned
bench-pinned: build ## Measure copies between the sidecar's memory and a GPU
	PYTHONPATH=$(PYTHON_DIR):$(BENCH_PYTHON_DIR) '$(PINNED_PYTHON)' -m membrane_bench.pinned bin/membrane $(PINNED_FLAGS)

# How long requests run under faults, and with which seed (none: a random one,
# which is printed).
CHAOS_TIME ?= 10m
CHAOS_SEED ?=

.PHONY: bench-check
bench-check: build ## Measure the core paths shortly; fail below tools/bench-floors.txt
	bin/membrane bench core --quick --rounds 7 --floors tools/bench-floors.txt --attempts 8

.PHONY: chaos
chaos: build ## Kill, stop and restart members for CHAOS_TIME, comparing every token
	bin/membrane bench chaos --duration=$(CHAOS_TIME) $(addprefix --seed=,$(CHAOS_SEED))

.PHONY: soak
soak: ## The same for an hour
	$(MAKE) chaos CHAOS_TIME=1h

.PHONY: lint
lint: lint-go lint-python ## Check format, imports, docs and types; changes nothing

.PHONY: lint-go
lint-go:
	@unformatted=$$($(STATIC) $(TOOL) gofumpt -l $(wildcard */)); \
	if [[ -n $$unformatted ]]; then printf 'not formatted, run make fmt:\n%s\n' "$$unformatted" >&2; exit 1; fi
	go mod tidy -diff
	$(STATIC) go vet ./...
	$(STATIC) $(TOOL) golangci-lint run ./...

.PHONY: lint-python
lint-python: pytools
	'$(PYTOOLS)/ruff' check --no-cache --config tools/ruff.toml $(PYTHON_DIRS) $(BENCH_HELPER)
	'$(PYTOOLS)/ruff' format --no-cache --config tools/ruff.toml --check $(PYTHON_DIRS) $(BENCH_HELPER)
	'$(PYTOOLS)/mypy' --config-file tools/mypy.ini $(PYTHON_DIRS)
	'$(PYTOOLS)/mypy' --config-file tools/mypy.ini $(BENCH_HELPER)
	'$(PYTOOLS)/shellcheck' $$(git ls-files .ci '*.sh')

# The environment itself lies outside the checkout, so that clones share it.
.PHONY: pytools
pytools:
	@mkdir -p .venv; venv=$$(.ci/venv.sh tools tools/python-requirements.txt); ln -sfn "$$venv" .venv/tools

.PHONY: fmt
fmt: pytools ## Format Go and Python
	$(STATIC) $(TOOL) gofumpt -w $(wildcard */)
	'$(PYTOOLS)/ruff' format --no-cache --config tools/ruff.toml $(PYTHON_DIRS) $(BENCH_HELPER)

# protoc comes with Python's grpcio-tools, its plugins are Go tools.
.PHONY: proto
proto: grpctools ## Generate the Go code of the gRPC interface again
	@mkdir -p bin/proto
	cd tools && $(STATIC) go build -o '$(CURDIR)/bin/proto/' google.golang.org/protobuf/cmd/protoc-gen-go google.golang.org/grpc/cmd/protoc-gen-go-grpc
	PATH='$(CURDIR)/bin/proto':"$$PATH" .venv/grpc/bin/python -m grpc_tools.protoc -I $(PROTO_DIR) \
		--go_out=$(PROTO_DIR) --go_opt=paths=source_relative \
		--go-grpc_out=$(PROTO_DIR) --go-grpc_opt=paths=source_relative $(PROTO_DIR)/transfer.proto

.PHONY: grpctools
grpctools:
	@mkdir -p .venv; venv=$$(.ci/venv.sh grpc tools/grpc-requirements.txt); ln -sfn "$$venv" .venv/grpc
	'$(PYTOOLS)/ruff' format --no-cache --config tools/ruff.toml $(PYTHON_DIRS)

.PHONY: fuzz
fuzz: ## Run each fuzz target for FUZZTIME
	tools/fuzz.sh $(FUZZTIME)

.PHONY: cover
cover: coverage.out ## Print coverage; fail below tools/coverage-floors.txt
	@awk -f tools/cover.awk tools/coverage-floors.txt coverage.out

coverage.out:
	$(MAKE) test-plain

.PHONY: vuln
vuln: ## Look for known vulnerabilities (reads the Go vulnerability database)
	$(STATIC) $(TOOL) govulncheck ./...

.PHONY: image
image: ## Build the container image
	docker build --build-arg VERSION='$(VERSION)' --tag '$(IMAGE)' .

.PHONY: clean
clean: ## Remove what the other targets made in this folder
	rm -rf bin build coverage.out
	find $(PYTHON_DIRS) -depth -name __pycache__ -exec rm -rf {} + 2>/dev/null || true
