# Everything a newcomer or CI does: `make demo` and `make test` each work from nothing, alone or one after the other.

PYTHON ?= python3
TORCH  ?= torch==2.13.0
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install -qq --no-input --disable-pip-version-check  # -qq: errors alone
LOCK   := $(if $(shell command -v flock),flock $(VENV).lock,)
SHELL  := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help demo test lint types unit docs bench bench-quick install-size clean

help: ## Say what can be made
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /|/' | awk -F'|' '{printf "  make %-14s%s\n", $$1, $$2}'
	@echo
	@echo "  PYTHON=python3.12  another interpreter (3.11 or newer) for a new $(VENV)"
	@echo "  TORCH=WHEEL        another build of torch for the tests; the demo and the server need none"

# ── environments: a stamp says what has been installed; it is written last, so a broken install is made again ────────

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "triptych needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) -V 2>&1). Try: make PYTHON=python3.12"; exit 1; }
	@echo "making $(VENV) with $$($(PYTHON) -V)"
	@$(LOCK) $(PYTHON) -m venv $(VENV)

$(VENV)/.serving: pyproject.toml | $(VENV)/bin/python
	@echo "installing triptych to compile and serve (no torch)"
	@$(LOCK) $(PIP) -e . 'openai>=2,<4'
	@touch $@

$(VENV)/.developing: pyproject.toml | $(VENV)/bin/python
	@echo "installing triptych with all that its tests need ($(TORCH): a few minutes the first time)"
	@$(LOCK) $(PIP) $(TORCH)
	@$(LOCK) $(PIP) -e '.[dev]'
	@touch $@ $(VENV)/.serving

# ── what people do ───────────────────────────────────────────────────────────────────────────────────────────────────

demo: $(VENV)/.serving ## Assemble triptych-mini, serve it, ask it about two pictures, stop
	@$(BIN)/python examples/demo.py

test: lint types unit ## Lint, strict types, the whole test suite

lint: $(VENV)/.developing ## Ruff
	$(BIN)/ruff check .

types: $(VENV)/.developing ## mypy --strict
	$(BIN)/mypy
	$(BIN)/mypy --strict examples/session.py docs/generate.py

unit: $(VENV)/.developing ## pytest
	$(BIN)/python -m pytest

docs: $(VENV)/.developing ## Fill the generated blocks of README.md and docs/
	$(BIN)/python docs/generate.py

bench: $(VENV)/.developing ## Measure all that this environment can (an hour, an idle machine); bench/README.md has the others
	$(BIN)/python bench/rivals/install.py llama genai ort vllm triptych
	$(BIN)/python bench/engine.py --json bench/results/engine.json
	$(BIN)/python bench/machine.py --json bench/results/machine.json
	$(BIN)/python bench/inverse_batch.py --json bench/results/inverse_batch.json
	$(BIN)/python bench/speculation.py demo --json bench/results/speculation.json
	$(BIN)/python bench/fairness.py demo --rounds 4 --json bench/results/fairness.json
	$(BIN)/python bench/vision_int8.py --json bench/results/vision_int8.json

bench-quick: $(VENV)/.developing ## One short round of our own engine: does the bench work? No figure counts
	$(BIN)/python bench/engine.py --quick --only triptych

install-size: $(VENV)/.developing ## Measure what `pip install .` brings
	$(BIN)/python bench/install_size.py --json bench/results/install_size.json

clean: ## Remove what the targets above made
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
