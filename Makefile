# `make demo` trains a real model, `make test` runs the tests. Both install what they need.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

# One worker per core; an idle worker takes over tests from the others. Temporary files are in memory if possible: tests of
# full disks bring their own.
WORKERS ?= $(shell nproc 2>/dev/null || echo 2)
MEMORY := $(wildcard /dev/shm)
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(if $(MEMORY),--basetemp=$(MEMORY)/shoal-tests-$$PPID)

# Else every process that a test starts would compile the package and the tests again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-slow lint check docs clean

# torch first and pinned: otherwise pip would install the newest build.
$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev,chess,data]'
	touch $@

# Trains a small Llama on generated chess games with two processes, then evaluates it with plain transformers.
demo: $(VENV)/.installed
	$(BIN)/python examples/chess_demo.py --how-long recipes/chess-tiny.yaml
	$(BIN)/shoal train recipes/chess-tiny.yaml --overwrite
	$(BIN)/python examples/chess_demo.py runs/chess-tiny

# mypy without its cache takes half a minute of one core: it runs while the tests do, and its report comes last.
TYPES := .mypy_cache/report.txt
test: lint
	mkdir -p $(dir $(TYPES))
	$(BIN)/mypy > $(TYPES) 2>&1 & types=$$!; \
	$(PYTEST) -m 'not slow'; tested=$$?; \
	wait $$types; typed=$$?; cat $(TYPES); \
	exit $$((tested | typed))

test-slow: $(VENV)/.installed
	$(PYTEST) -m slow

lint: $(VENV)/.installed
	$(BIN)/ruff check src tests examples benchmarks
	$(BIN)/ruff format --check src tests examples benchmarks

check: lint
	$(BIN)/mypy

docs: $(VENV)/.installed
	$(BIN)/python -m shoal.config.document > docs/config.md
	$(BIN)/python -m shoal.catalogue.document > docs/models.md
	$(BIN)/python -m shoal.convert.configs.document docs/coming-from
	$(BIN)/python benchmarks/plan_document.py
	$(BIN)/python -m benchmarks.pictures
	$(BIN)/python -m benchmarks.pages

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
