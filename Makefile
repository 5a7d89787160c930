# Everything runs from a fresh clone: each target sets up what it needs first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help setup demo examples test bench lint clean

help: ## show this list
	@echo "Eggroll Trainer. Targets:"
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 10 | sed 's/^/  make /'

setup: $(STAMP) ## virtual environment with the tested versions (CPU torch)

$(STAMP): pyproject.toml constraints.txt
	@echo "setting up $(VENV) (a minute or two) ..."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev]"
	@touch $@

demo: $(STAMP) ## EGGROLL and dense ES on handwritten digits: bars, a table, a plot
	@$(BIN)/python examples/basic_example.py

examples: $(STAMP) ## every example, on a small budget
	@$(BIN)/python examples/basic_example.py --seconds 10
	@$(BIN)/python examples/custom_algorithm.py

test: $(STAMP) ## the tests
	@$(BIN)/python -m pytest

bench: $(STAMP) ## every table of the README, measured here
	@$(BIN)/python benchmarks/run.py

lint: $(STAMP) ## ruff and mypy
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

clean: ## remove the virtual environment and caches
	@rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache dist
