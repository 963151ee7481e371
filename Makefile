# Two commands do everything on a fresh machine: `make run` and `make test`. Each sets up .venv by itself.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Tests of a file stay together: what several of them compare to is computed once.
PYTEST = $(BIN)/python -m pytest -m "not soak" -n 2 --dist loadfile --no-loadscope-reorder
GIVE_WAY := nice -n 2

# Of several that run at once, each line says whose it is.
SHELL := bash
.SHELLFLAGS := -o pipefail -c
says = 2>&1 | sed -u 's/^/$(1): /'

# Hundreds of processes of the tests import the same sources: they are compiled once, whatever the caller's shell says.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help setup run test test-processes test-units check layout layers types bench docs soak matrix release clean

help:
	@echo "make run    train digits on 2 workers (the main job, on data that comes with a dependency)"
	@echo "make test   everything CI checks: format, lint, types, import layers, tests, docs"
	@echo "make check  the static part of it: format, lint, types, import layers"
	@echo "make bench  the benchmarks, side by side with peers; writes benchmarks/results/"
	@echo "make docs   the documentation as a site, with search and the API reference, in build/site"
	@echo "make soak   the long checks: kills, 300 live faults, long runs"
	@echo "make matrix the tests of one process under every Python that is installed, with the lowest and the newest torch"
	@echo "make release  the wheel, its SBOM and checksums in build/release; release/release.py says how to sign them"

setup: $(READY)

$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $(READY)

run: setup
	$(BIN)/manyhands train digits --workers 2

check: layout layers types

layout: setup
	$(BIN)/ruff format --check src tests benchmarks docs examples release
	$(BIN)/ruff check src tests benchmarks docs examples release

layers: setup
	$(GIVE_WAY) $(BIN)/lint-imports

types: setup
	$(GIVE_WAY) $(BIN)/mypy

# Process tests mostly wait: for processes to start, to be missed, to end. What computes, does so meanwhile and gives way.
test: layout
	$(MAKE) --no-print-directory -j 3 test-processes test-units layers types

test-processes: setup
	$(PYTEST) tests/processes $(call says,processes)

test-units: setup
	$(GIVE_WAY) $(PYTEST) tests/cluster tests/unit $(call says,units)

docs: setup
	$(BIN)/python -m sphinx -q -W --keep-going -b html docs build/site
	@echo "build/site/index.html"

bench: setup
	$(BIN)/manyhands bench allreduce --workers 2 --json benchmarks/results/allreduce-2.json
	$(BIN)/manyhands bench allreduce --workers 4 --json benchmarks/results/allreduce-4.json
	$(BIN)/manyhands bench backend --workers 2 --json benchmarks/results/backend-2.json
	$(BIN)/manyhands bench backend --workers 4 --json benchmarks/results/backend-4.json
	$(BIN)/manyhands bench step --workers 2 --json benchmarks/results/step-2.json
	$(BIN)/manyhands bench server --json benchmarks/results/server.json
	$(BIN)/python benchmarks/loading.py --json benchmarks/results/loading-2.json
	$(BIN)/python benchmarks/stragglers.py
	$(BIN)/python benchmarks/glove.py
	$(BIN)/python benchmarks/regression.py
	$(BIN)/python benchmarks/filters.py
	$(BIN)/python benchmarks/gbdt.py
	$(BIN)/python benchmarks/classes.py
	$(BIN)/python benchmarks/plan.py --json benchmarks/results/plan-2.json
	$(BIN)/python benchmarks/auto.py --json benchmarks/results/auto-2.json
	$(BIN)/python benchmarks/plan_links.py --json benchmarks/results/plan-links.json
	$(BIN)/python benchmarks/public_tables.py
	$(BIN)/python benchmarks/links.py
	$(BIN)/python benchmarks/events.py
	$(BIN)/python benchmarks/desync.py
	$(BIN)/python benchmarks/startup.py
	$(BIN)/python benchmarks/first_minute.py

soak: setup
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[dev,ray]'
	$(BIN)/python -m pytest -m soak --timeout 1800

matrix:
	$(PYTHON) release/matrix.py --json build/matrix.json

release: setup
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[dev,release]'
	$(BIN)/python release/release.py build

clean:
	rm -rf $(VENV) build .mypy_cache .ruff_cache .pytest_cache
