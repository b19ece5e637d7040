# `make demo` trains a real model, `make test` runs the tests. Both install what they need.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

# One worker per core; an idle worker takes over tests from the others. Temporary files are in memory if possible: tests of
# full disks bring their own.
WORKERS ?= $(shell nproc 2>/dev/null || echo 2)
MEMORY := $(wildcard /dev/shm)
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(if $(MEMORY),--basetemp=$(MEMORY)/shoal-tests-$$PPID)
# A session leaves more than a gigabyte of them, of memory: they are kept only where a test failed.
FREE = $(if $(MEMORY),rm -rf $(MEMORY)/shoal-tests-$$PPID,true)

# Else every process that a test starts would compile the package and the tests again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-slow lint check docs reference clean

# torch first and pinned: otherwise pip would install the newest build.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,chess,data]'
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
	$(PYTEST) -m 'not slow' && $(FREE); tested=$$?; \
	wait $$types; typed=$$?; cat $(TYPES); \
	exit $$((tested | typed))

test-slow: $(VENV)/.installed
	$(PYTEST) -m slow && $(FREE)

lint: $(VENV)/.installed
	$(BIN)/ruff check src tests examples benchmarks
	$(BIN)/ruff format --check src tests examples benchmarks

check: lint
	$(BIN)/mypy

# Writes the generated pages, then the site in build/site.
docs: reference
	$(BIN)/python benchmarks/plan_document.py
	$(BIN)/python -m benchmarks.pictures
	$(BIN)/python -m benchmarks.pages
	$(BIN)/python -m benchmarks.measured
	$(BIN)/python benchmarks/gpu/sweep.py --forecast benchmarks/gpu/sweep_h200/sweep.json > docs/.page
	mv docs/.page benchmarks/gpu/sweep_h200/sweep.md
	$(BIN)/python -m benchmarks.docs_output docs/tutorials/out-of-memory.md
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "The site is in build/site: open build/site/index.html"

# The pages that are written from code; a test compares them. A page is replaced only if its program succeeds.
GENERATED := config.md=shoal.config.document models.md=shoal.catalogue.document \
  commands.md=shoal.cli.document json.md=shoal.cli.json_document api.md=shoal.api.document \
  metrics.md=shoal.observe.metric_names traits.md=shoal.plan.systems.document
reference: $(VENV)/.installed
	set -e; for page in $(GENERATED); do \
	  $(BIN)/python -m $${page#*=} > docs/.page; mv docs/.page docs/$${page%%=*}; done
	$(BIN)/python -m shoal.convert.configs.document docs/coming-from

clean:
	rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache
