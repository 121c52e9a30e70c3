# Everything that a person or CI runs often, from a fresh clone with nothing but Python 3.11 or newer. `make help` lists
# it; CONTRIBUTING.md lists what is run rarely.

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
TOOLS := $(VENV)/.tools
PIP := $(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt
TEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal

.PHONY: help venv train test test-all lint check mutants docs pages bench clean

help: ## Show the targets
	@grep -hE '^[a-z0-9-]+:.*## ' Makefile | sed -E 's/^([a-z0-9-]+):.*## /\1\t/' | expand -t 18

venv: $(TOOLS) ## Make .venv with the package and all tools, at the versions of constraints.txt

train: $(INSTALLED) ## Train the quickstart recipe: a private classifier of scikit-learn's digits, in seconds
	$(BIN)/dpsgd train quickstart

test: venv ## Run the fast tests, one process a core (ARGS=tests/engine for a part)
	$(TEST) -m "not slow and not long" $(ARGS)

test-all: venv ## Run the tests of CI (with real data where DPSGD_DATA names it; ARGS='-m long' for those that CI leaves out)
	$(TEST) $(ARGS)

lint: venv ## Check style, formatting, types, which room imports which, and how long rooms are
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo --no-cache
	$(BIN)/python -m tests.ceilings
	$(BIN)/mypy dpsgd_cli tests examples benchmarks/tabular $(wildcard benchmarks/*.py)

check: lint test-all ## Everything that CI runs

mutants: venv ## Change single privacy-critical places; the tests must notice each (hours; ARGS=noise for a part)
	$(BIN)/python tests/mutants/run.py $(ARGS)

docs: venv ## Build the site into build/site, to be read without a server (a minute: its gallery is made by commands)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

pages: venv ## Draw the pages of results/ from their CSVs again; trains nothing
	$(BIN)/python -m benchmarks.pages redraw

bench: venv ## Compare speed with other libraries (minutes; ARGS='--device cuda' on a machine with a GPU)
	$(PIP) --quiet --editable '.[bench,transformers]'
	$(BIN)/python -m benchmarks.steps $(ARGS)
	$(BIN)/python -m benchmarks.accounting

clean: ## Remove the virtual environment, builds and caches; results stay
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(INSTALLED): setup.cfg pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "dpsgd needs Python 3.11 or newer as $(PYTHON); try: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
		echo "$(PYTHON) cannot make virtual environments; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) --quiet --editable .
	@touch $@

$(TOOLS): $(INSTALLED)
	$(PIP) --quiet --editable '.[test,dev,docs]'
	@touch $@
