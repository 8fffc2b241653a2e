# `make demo` and `make test` do all the setup. They need Python >= 3.10 and nothing else.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
DOCS_INSTALLED := .venv/.docs-installed

.PHONY: demo test test-slow coverage check format tables docs bench clean help

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1	/'

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "keepk needs Python >= 3.10; run make PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: $(INSTALLED)  ## prune a network to exactly K channels on bundled data, save, load and measure it; about a minute
	$(BIN)/keepk demo

check: $(INSTALLED)  ## check formatting, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

test: check  ## check, then run all tests and doctests with warnings as errors
	$(BIN)/python -m pytest -n 2

test-slow: $(INSTALLED)  ## shrink 3,000 random networks and compare them with masked copies
	KEEPK_SLOW=1 $(BIN)/python -m pytest -n 2 tests/laws/test_shrunk_is_masked.py -k slow

coverage: $(INSTALLED)  ## run all tests with coverage of lines and branches; writes HTML to coverage/
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest -n 2
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage html --quiet
	$(BIN)/coverage report

format: $(INSTALLED)  ## format the code and fix lint with ruff
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

tables: $(INSTALLED)  ## regenerate the docs' tables from results/
	$(BIN)/python -m keepk_paper.tables.pages README.md docs/*.md docs/decisions/*.md

$(DOCS_INSTALLED): $(INSTALLED)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --constraint constraints.txt --editable '.[docs]'
	touch $@

docs: $(DOCS_INSTALLED)  ## build the documentation into site/, with warnings as errors
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going --fresh-env docs site

bench: $(INSTALLED)  ## repeat the benchmarks that need only keepk; writes to results/benchmarks/
	$(BIN)/python benchmarks/select_event.py --limit-gb 16 --out results/benchmarks/select_event.json
	$(BIN)/python benchmarks/hold_masks.py --out results/benchmarks/hold_masks.json
	$(BIN)/python benchmarks/collect_statistics.py --out results/benchmarks/collect_statistics.json
	$(BIN)/python benchmarks/annealed_run.py --threads 1 --out results/benchmarks/annealed_run.json
	$(BIN)/python benchmarks/inference.py --threads 1 --out results/benchmarks/inference.json
	$(BIN)/python benchmarks/paper_sizes.py --out results/benchmarks/paper_sizes.json
	$(BIN)/python benchmarks/compact_files.py --out results/benchmarks/compact_files.json
	$(BIN)/python benchmarks/fit.py --out results/benchmarks/fit.json

clean:  ## remove the virtual environment and all caches
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage .coverage.* coverage site
