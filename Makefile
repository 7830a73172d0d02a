# make setup   a virtual environment with everything that the checks need
# make rig     the Docker engines, the images and the security key that tests use, where the cache lacks them
# make check   lint, types, import contracts, unit tests
# make test    every test that this machine can run (root: network namespaces, bubblewrap)
# make bench   benchmarks, printed as ratios
# make demo    the main job on a temporary host with an internet of its own

PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2
BIN = $(VENV)/bin

.PHONY: packages setup rig lint check test bench demo clean

packages:
	PYTHON=$(PYTHON) deploy/packages.sh

setup: packages $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable . --group dev
	touch $@

rig: setup
	PYTHON=$(PYTHON) deploy/packages.sh rig
	$(BIN)/python -m tests.rig.docker build
	$(BIN)/python -m tests.rig.security_key

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	PATH=$(BIN):$$PATH $(BIN)/lint-imports

check: lint
	$(BIN)/pytest -q -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m "not rig and not bubblewrap and not docker and not k8s and not firecracker"

test: setup
	$(BIN)/pytest -q -n $(WORKERS) --dist loadfile --no-loadscope-reorder
	HYPOTHESIS_PROFILE=deep $(BIN)/pytest -q tests/core/test_machine.py -k lives_through_anything

bench: setup
	$(BIN)/python -m tests.bench

demo: setup
	$(BIN)/python -m tests.demo

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
