# Every target sets itself up: a virtual environment in .venv at the versions of constraints.txt, remade when
# pyproject.toml or constraints.txt changes. `make PYTHON=/path/to/python3.11 ...` picks another interpreter.
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

PYTHON ?= $(shell command -v python3.11 || command -v python3)
# Processes of the test run; each computes with one thread, so that results and times do not depend on cores.
JOBS ?= 2
VENV := .venv
BIN := $(VENV)/bin
RUN := $(VENV)/.runtime
DEV := $(VENV)/.dev

.PHONY: help demo compare bench test style format clean

help: ## Show this list
	@sed -nE 's/^([a-z]+):.*## (.*)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18

demo: $(RUN) ## Train a small Qwen3-MoE with int4 rollouts in three minutes and write its report
	$(BIN)/qarl train examples/configs/local_demo.yaml

compare: $(RUN) ## BF16, rollout-only and QaRL side by side, several seeds each, one report
	$(BIN)/qarl train examples/configs/local_compare.yaml

bench: $(RUN) ## Measure quantization error and the engine, into docs/
	$(BIN)/python kernels/benchmarks/scale_convention.py
	$(BIN)/python tools/bench_local.py --record docs/results/bench.json
	$(BIN)/python tools/render_results.py

test: $(DEV) ## Run all tests; those that need a GPU skip without one
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS)

style: $(DEV) ## Check format, lint, import contracts and that tables in docs show the recorded figures
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports --no-logo
	$(BIN)/python tools/render_results.py --check

format: $(DEV) ## Format and fix what can be fixed, render the tables in docs
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/python tools/render_results.py

clean: ## Remove the environment and every cache; runs/ stays
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "$(PYTHON) is older than Python 3.11; name a newer one: make PYTHON=python3.11 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(RUN) $(DEV): INSTALL = @echo "Installing into $(VENV); the first time takes minutes"; \
	$(BIN)/python -m pip install --quiet -c constraints.txt

$(RUN): pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) -e .
	@touch $@

$(DEV): pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) -e '.[dev]'
	@touch $(RUN) $@
