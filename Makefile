# Everything runs from a fresh clone: each target sets up what it needs first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help setup demo examples mnist figures rl-demo test bench search lint clean

help: ## show this list
	@echo "Eggroll Trainer. Targets:"
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 10 | sed 's/^/  make /'

setup: $(STAMP) ## virtual environment with the tested versions (CPU torch)

$(STAMP): pyproject.toml constraints.txt
	@echo "setting up $(VENV) (a minute or two) ..."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev]"
	@touch $@

demo: $(STAMP) ## EGGROLL and dense ES on handwritten digits: bars, a table, a plot
	@$(BIN)/python examples/basic_example.py

# Full MNIST: a folder of its four IDX files; without it openml.org, or else a small part of it.
DATA_DIR ?=
DATA := $(if $(DATA_DIR),--data-dir $(DATA_DIR))

examples: $(STAMP) ## every example, on a small budget (under ten minutes)
	@$(BIN)/python examples/basic_example.py --seconds 5
	@$(BIN)/python examples/custom_algorithm.py --seconds 30
	@$(BIN)/python examples/comparison_framework.py --forward-passes 3e6 --seeds 2 $(DATA)
	@$(BIN)/python examples/mnist_comparison.py --seconds 12 $(DATA)
	@$(BIN)/python examples/nondifferentiable.py --seconds 6 $(DATA)
	@$(BIN)/python examples/run_all_comparisons.py --seconds 6 $(DATA)

MINUTES ?= 10
mnist: $(STAMP) ## EGGROLL on MNIST for MINUTES=10, SGD and Adam for one (DATA_DIR=folder)
	@$(BIN)/python examples/mnist_comparison.py --seconds $$((60 * $(MINUTES))) --hidden 128 --compile \
		--baseline-seconds 60 --out results/mnist $(DATA)

figures: $(STAMP) ## the figures and numbers of every example, into docs/images (an hour and a half)
	@$(BIN)/python examples/basic_example.py --seconds 40 --out docs/images/basic_example
	@$(BIN)/python examples/custom_algorithm.py --out docs/images/custom_algorithm
	@$(BIN)/python examples/comparison_framework.py --forward-passes 50e6 \
		--out docs/images/comparison_framework $(DATA)
	@$(BIN)/python examples/mnist_comparison.py --seconds 60 --seeds 3 \
		--out docs/images/mnist_comparison $(DATA)
	@$(BIN)/python examples/nondifferentiable.py --seconds 30 --out docs/images/nondifferentiable $(DATA)
	@$(BIN)/python examples/run_all_comparisons.py --seconds 120 --compile \
		--out docs/images/run_all_comparisons $(DATA)
	@$(BIN)/python examples/run_all_comparisons.py --only Transformer --methods EGGROLL --seconds 300 \
		--compile --out docs/images/transformer_5_minutes $(DATA)

rl-demo: $(STAMP) ## a HalfCheetah learns to run, with pictures (three minutes)
	@$(BIN)/python examples/rl/train_mujoco.py --task HalfCheetah --minutes 2.2 --out results/rl-demo

search: $(STAMP) ## the settings that docs/choosing.md reports, tried again (15 minutes)
	@$(BIN)/python benchmarks/mnist_search.py $(DATA)

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
