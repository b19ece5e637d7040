# Two commands: `make demo` trains a real model, `make test` proves the promises. Both install what they need.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

# One worker per core takes tests from the others when it has none left. Temporary files are in memory where that is
# possible: what a disk does is tested with disks of its own.
WORKERS ?= $(shell nproc 2>/dev/null || echo 2)
MEMORY := $(wildcard /dev/shm)
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(if $(MEMORY),--basetemp=$(MEMORY)/shoal-tests-$$PPID)

.PHONY: demo test test-slow check docs clean

# torch first and pinned: anything else would bring whichever build is newest.
$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev,chess]'
	touch $@

# A small Llama learns chess on two processes, from games played here; then plain transformers says what it learnt.
demo: $(VENV)/.installed
	$(BIN)/python examples/chess_demo.py --how-long recipes/chess-tiny.yaml
	$(BIN)/shoal train recipes/chess-tiny.yaml --overwrite
	$(BIN)/python examples/chess_demo.py runs/chess-tiny

test: check
	$(PYTEST) -m 'not slow'

test-slow: $(VENV)/.installed
	$(PYTEST) -m slow

check: $(VENV)/.installed
	$(BIN)/ruff check src tests examples benchmarks
	$(BIN)/ruff format --check src tests examples benchmarks
	$(BIN)/mypy

docs: $(VENV)/.installed
	$(BIN)/python -m shoal.config.document > docs/config.md
	$(BIN)/python benchmarks/plan_document.py

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
