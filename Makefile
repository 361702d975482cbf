# Everything happens in .venv, built on first use and again when its inputs change.
# A GPU build of torch: make demo TORCH="torch==2.13.0 --index-url <the index of your CUDA version>"

PYTHON ?= python3
TORCH ?= torch==2.13.0
BIN := .venv/bin
STAMP := .venv/.installed
TEST_ENV := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1

.DEFAULT_GOAL := help
.PHONY: help demo test test-all conformance guard faults fuzz lint format clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(STAMP) ## train the embedded recipe and print its result (ARGS="..." are passed on)
	$(BIN)/leangrpo train $(ARGS)

# By file, as the fixtures that start ranks are shared within one: they must not run in both workers.
test: lint ## what CI runs: lint, types, all but the slow tests
	$(TEST_ENV) $(BIN)/pytest -n 2 --dist loadfile -m "not slow"

test-all: lint ## the same with the long campaigns
	$(TEST_ENV) $(BIN)/pytest -n 2 --dist loadfile -m "slow or not slow"

conformance: $(STAMP) ## every algorithm on every kind of model, as a table (ARGS="--models sd3" are passed on)
	$(TEST_ENV) $(BIN)/python tests/conformance.py $(ARGS)

guard: $(STAMP) ## what got slower or heavier than recorded (ARGS="--record" records)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/guard.py $(ARGS)

faults: $(STAMP) ## what a run survives, as a table (ARGS="--kills 5 --only kill,sigterm")
	$(TEST_ENV) $(BIN)/python tests/faults.py $(ARGS)

fuzz: $(STAMP) ## hostile settings, prompts, checkpoints and servers, by the thousand
	$(TEST_ENV) $(BIN)/python tests/fuzz.py $(ARGS)

lint: $(STAMP) ## ruff (rules and format) and mypy --strict
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy --strict src/leangrpo

format: $(STAMP) ## rewrite the files the way `make lint` wants them
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean: ## remove caches and build leftovers; .venv and runs/ stay
	rm -rf build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests scripts -name __pycache__ -type d -prune -exec rm -rf {} +

# torch goes first and alone, so that nothing later chooses another build of it. Its line is
# taken out of the constraints so that TORCH may name another version.
# Of rapidocr only the model file is read, so its own dependencies stay out (--no-deps).
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo 'leangrpo needs Python 3.11 or newer, and $(PYTHON) is not.' \
	       'Name one that is: make PYTHON=python3.12'; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q $(TORCH)
	grep -v '^torch==' constraints.txt > .venv/constraints.txt
	$(BIN)/python -m pip install -q -c .venv/constraints.txt -e '.[dev]' onnxruntime
	$(BIN)/python -m pip install -q -c .venv/constraints.txt --no-deps rapidocr
	touch $@
