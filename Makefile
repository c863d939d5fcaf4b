# The entry points of the project; `make help` lists them. PYTHON chooses the interpreter that .venv is made with.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PYTEST_ARGS ?=
# Without bytecode every process compiles torch, Prefect and MLflow again; empty is off, whatever the environment has.
export PYTHONDONTWRITEBYTECODE :=
# A file's tests share its fixtures, so they run in one process; tests/support/costs.py puts the longest files first.
PARALLEL := -n 2 --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help install demo test test-fast test-long fix lint lint-types lint-code lint-docs docs golden up down mlflow-ui prefect-ui bench benchmark throughput clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(STAMP)  ## .venv with pinned dependencies, and the embedded backbone; quick when nothing changed
	@$(BIN)/python -c "from components.environment import configure_libraries; configure_libraries(); from components.models.backbone import fetch_backbone; fetch_backbone('embedded')"

$(STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "error: there is no '$(PYTHON)' here: install Python 3.11 or newer, or name one, e.g. make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "error: Python 3.11 or newer is needed, and $(PYTHON) is $$($(PYTHON) -V 2>&1): name a newer one, e.g. make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV) || { echo "error: $(PYTHON) cannot make a virtual environment: install its venv module (on Debian and Ubuntu the package python3-venv)" >&2; exit 1; }
	@echo "installing pinned dependencies into $(VENV) (minutes the first time) ..."
	@$(BIN)/python infra/install.py
	@touch $@

demo: install  ## the whole pipeline on the recipe summarization/demo
	@$(BIN)/fed-rlhf run summarization/demo

test: install  ## unit tests and an example of each promise of the pipeline, in two processes; PYTEST_ARGS are passed to pytest
	@$(BIN)/python -m pytest $(PARALLEL) -m 'not long' $(PYTEST_ARGS)

test-fast: install  ## without whole runs, servers and processes of their own
	@$(BIN)/python -m pytest $(PARALLEL) -m 'not long and not pipeline' $(PYTEST_ARGS)

test-long: install  ## all other tests: whole runs, every method, Ray, servers, kills, many random inputs; continues where it was stopped
	@$(BIN)/python -m tests.support.long_tier --run $(FILES)

fix: install  ## write what `make lint` compares: formats, reference pages, tables of results; with LOSS_CURVES=1 the stored loss curves too
	@$(BIN)/ruff check --quiet --fix . || true
	@$(BIN)/ruff format --quiet .
	@$(BIN)/python -m docs.generate_results
	@$(BIN)/python docs/generate_reference.py
	@if [ -n "$(LOSS_CURVES)" ]; then $(BIN)/python -m tests.golden.test_loss_curves --update; fi

lint: install  ## style, formatting, the direction of imports, types, and the documentation
	@$(MAKE) --no-print-directory --jobs=2 --output-sync lint-types lint-code lint-docs

lint-types:
	@$(BIN)/mypy

lint-code:
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/lint-imports

lint-docs:
	@$(BIN)/python docs/generate_reference.py --check
	@$(BIN)/python -m docs.generate_results --check
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

docs: install  ## the documentation site in build/site, with the reference pages generated from the code
	@$(BIN)/python docs/generate_reference.py
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

golden: install  ## compare the results of commit BASE with those of the working tree, bit by bit; ten minutes
	@$(BIN)/python -m tests.golden.compare $(BASE)

up: install  ## Prefect server, MLflow server and a worker on loopback, with the deployments of prefect.yaml
	@$(BIN)/fed-rlhf up

down:  ## stop what `make up` started
	@if [ -x $(BIN)/fed-rlhf ]; then $(BIN)/fed-rlhf down; else echo "nothing is up"; fi

mlflow-ui: install  ## the MLflow server alone, until Ctrl-C
	@$(BIN)/python -m infra.servers mlflow-server

prefect-ui: install  ## the Prefect server alone, until Ctrl-C
	@$(BIN)/python -m infra.servers prefect-server

benchmark: install  ## methods side by side with three seeds; an hour a seed and more
	@$(BIN)/fed-rlhf benchmark

bench: install  ## cost of orchestration and of the selector's step, as a table
	@$(BIN)/python -m perf selector-step
	@$(BIN)/python -m perf orchestration

throughput: install  ## speed and memory of selector training at published shapes; for a GPU
	@$(BIN)/python -m perf throughput

clean: down  ## remove .venv and the tools' caches; runs, data and databases stay
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache .import_linter_cache build dist *.egg-info
	find components fed_rlhf flows tasks infra perf tests -name __pycache__ -type d -prune -exec rm -rf {} +
