# Two commands: `make demo` trains a real model, `make test` proves the promises. Both install what they need.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

# Tests run in two processes side by side: these folders take about as long as all the others together.
ONE_HALF := tests/parity tests/train tests/parallel tests/models
OTHER_HALF := $(filter-out $(ONE_HALF) tests/__pycache__,$(patsubst %/,%,$(wildcard tests/*/)))

.PHONY: demo test test-slow one-half other-half check docs clean

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
	$(MAKE) -j2 KIND='not slow' one-half other-half

test-slow: $(VENV)/.installed
	$(MAKE) -j2 KIND=slow ONE_HALF='$(ONE_HALF) tests/launch tests/plan tests/use' one-half other-half

one-half:
	$(BIN)/python -m pytest -m '$(KIND)' $(ONE_HALF)

other-half:
	$(BIN)/python -m pytest -m '$(KIND)' $(OTHER_HALF)

check: $(VENV)/.installed
	$(BIN)/ruff check src tests examples benchmarks
	$(BIN)/ruff format --check src tests examples benchmarks
	$(BIN)/mypy

docs: $(VENV)/.installed
	$(BIN)/python -m shoal.config.document > docs/config.md
	$(BIN)/python benchmarks/plan_document.py

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
