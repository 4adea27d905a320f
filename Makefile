# Every target builds .venv when it is missing or pyproject.toml has changed; running one twice does no work twice.

PYTHON ?= python3
TORCH  ?= torch==2.13.0
# One test process per core, each with one thread: more threads than cores slow everything down.
JOBS   ?= 2

VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

export OMP_NUM_THREADS ?= 1

.PHONY: help demo test test-full fuzz fuzz-files lint format bench clean

help:
	@echo "make demo       train a small GPT on 4 local workers (pipeline x data parallel), about 4 minutes"
	@echo "make test       the test suite, about 13 minutes on 2 cores"
	@echo "make test-full  the test suite with the slow tests"
	@echo "make fuzz       N=2000 random compositions against plain PyTorch; goes on where it ended"
	@echo "make fuzz-files N=20000  damage so many files of each kind, and read them"
	@echo "make lint       ruff, mypy, layers"
	@echo "make format     let ruff rewrite the sources"
	@echo "make bench      the benchmarks, about 40 minutes; on a quiet machine"
	@echo "make clean      remove .venv and caches"

# torch comes first and pinned, so that installing the project never pulls another one.
$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev]"
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/piper train examples/gpt_stdlib.toml

test: $(STAMP)
	$(BIN)/python -m pytest -n $(JOBS)

test-full: $(STAMP)
	$(BIN)/python -m pytest -n $(JOBS) -m ""

# Seeds FIRST, FIRST + 1, …; results and scripts of failures are in runs/fuzz.
N     ?= 2000
FIRST ?= 1000
fuzz: $(STAMP)
	PYTHONPATH=. nice -n 19 $(BIN)/python -m tests.random.fuzz $(N) --first $(FIRST)

fuzz-files: $(STAMP)
	PYTHONPATH=. nice -n 19 $(BIN)/python -m tests.fuzz.campaign -n $(N)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)
	$(BIN)/python -m benchmarks.run

clean:
	rm -rf $(VENV) build dist src/*.egg-info .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
