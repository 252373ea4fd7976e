# Every target makes the virtual environment it needs, from the requirements alone.
PYTHON ?= python3
VENV ?= .venv
RUNS ?= runs
# Points of the demo at a time; an accelerator serves one.
PARALLEL ?= $(if $(wildcard /dev/nvidia0 /dev/kfd /dev/accel0 /dev/vfio/0),1,2)
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
DEVELOPING := $(VENV)/.installed-notebooks $(VENV)/.installed-dev $(VENV)/.installed-schema

.DEFAULT_GOAL := help

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(INSTALLED) $(DEVELOPING) ## make the virtual environment (PYTHON=python3.13 VENV=.venv-313 for another interpreter)

# Made anew when the requirements change, so that nothing removed from them lingers.
$(INSTALLED): requirements.txt pyproject.toml
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	@touch $@

# Its own requirements are not needed.
$(VENV)/.installed-schema: requirements-schema.txt $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r $<
	@touch $@

$(VENV)/.installed-%: requirements-%.txt $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@

demo: $(INSTALLED) ## train on real text under every mask strategy; ends with a table and a plot
	$(BIN)/python launch/sweep.py --config=experiments/mask_strategies.py:demo --parallel=$(PARALLEL)

test: $(DEVELOPING) ## the default tests
	$(BIN)/python -m pytest

test-slow: $(DEVELOPING) ## the tests that the default leaves out
	$(BIN)/python -m pytest -m slow

test-aot: $(DEVELOPING) $(VENV)/.installed-tpu ## compile a few programs for TPUs that are not there
	$(BIN)/python -m pytest tests/measure/test_aot.py

test-aot-gpu: $(DEVELOPING) $(VENV)/.installed-gpu-aot ## compile a few programs for GPUs that are not there
	$(BIN)/python -m pytest tests/measure/test_aot_gpu.py

parity: $(DEVELOPING) $(VENV)/.installed-parity ## compare with the reference model in PyTorch
	$(BIN)/python -m pytest tests/parity -m 'parity or slow or not slow'

peers: $(VENV)/.installed-parity ## time our attention layer beside Hugging Face's, on the CPU
	$(BIN)/python launch/peers.py --lengths=1024,4096,8192

aot: $(VENV)/.installed-tpu ## compile a small sweep for a TPU that is not there
	$(BIN)/python launch/aot.py --config=experiments/seed_claims.py:demo

aot-gpu: $(VENV)/.installed-gpu-aot ## compile a small sweep for GPUs that are not there
	$(BIN)/python launch/aot.py --config=experiments/gpu_attention.py:demo

notebooks: $(VENV)/.installed-notebooks ## run the notebooks, from their text files
	$(BIN)/jupytext --quiet --to ipynb analysis/notebooks/*.py
	$(BIN)/jupyter-execute --inplace analysis/notebooks/*.ipynb

report: $(INSTALLED) ## turn a folder of runs into one page, RUNS/report.html (RUNS=runs)
	$(BIN)/python launch/report.py --runs=$(RUNS)

lint: $(VENV)/.installed-dev ## ruff: check and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

clean: ## remove virtual environments and caches; runs/ stays
	rm -rf .venv .venv-* .pytest_cache .ruff_cache *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

figures: $(INSTALLED) ## draw the README's picture
	$(BIN)/python analysis/patterns.py

.PHONY: help setup demo test test-slow parity peers aot aot-gpu notebooks report test-aot test-aot-gpu lint figures clean
