# Every target sets up what it needs in a private .venv; `make demo` and `make test` are all a new clone needs.
VENV := .venv
PY := $(VENV)/bin/python
READY := $(VENV)/.ready
UNFINISHED := $(VENV)/.unfinished

# The first Python on this machine that is new enough; `make PYTHON=/path/to/python` chooses another.
IS_NEW_ENOUGH := 'import sys; sys.exit(sys.version_info < (3, 11))'
PYTHON ?= $(shell for python in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$python -c $(IS_NEW_ENOUGH) 2>/dev/null && { echo $$python; break; }; done)

# Test processes share the cores, so each of them computes on one.
PYTEST_WORKERS ?= -n logical --maxprocesses 4 --dist loadgroup

.PHONY: demo test lint types fmt setup clean

demo: setup
	$(VENV)/bin/nalaformer demo $(ARGS)

test: lint types
	OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false $(PY) -m pytest $(PYTEST_WORKERS) $(ARGS)

lint: setup
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

types: setup
	$(PY) -m basedpyright --pythonpath $(PY)

fmt: setup
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

setup: $(READY)

# .unfinished stands from before the first file until the last: what an interrupted run left is made anew.
$(READY): pyproject.toml
	@$(or $(PYTHON),false) -c $(IS_NEW_ENOUGH) 2>/dev/null || { \
		echo "nalaformer_hf needs Python 3.11 or newer as python3 on the PATH, or named: make PYTHON=/path/to/python3"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
		echo "$(PYTHON) has no venv and pip modules; on Debian and Ubuntu: apt-get install python3-venv"; exit 1; }
	@if test -e $(UNFINISHED) || ! test -x $(PY); then \
		rm -rf $(VENV) && mkdir $(VENV) && touch $(UNFINISHED) && $(PYTHON) -m venv $(VENV); fi
	@touch $(UNFINISHED)
	@$(PY) -m pip --version >/dev/null 2>&1 || $(PY) -m ensurepip
	@echo "Installing into $(VENV): about 6 GB, most of it torch. This takes some minutes."
	$(PY) -m pip install --disable-pip-version-check --editable '.[dev]'
	@rm -f $(UNFINISHED) && touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache
