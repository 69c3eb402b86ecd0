# make sweep: install into .venv and run the fusion-threshold sweep.   make test: run all tests.
# Needs Python 3.11 or newer and make; PYTHON=python3.12 chooses another one.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Bytecode is written when a file is first imported, for of the many installed few ever are.
unexport PYTHONDONTWRITEBYTECODE
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet install --no-compile --no-input

.PHONY: help sweep test check format clean

help:
	@echo "make sweep   which fusion threshold is fastest here? (under 2 minutes on 2 cores; it says where the report is)"
	@echo "make test    run all tests"
	@echo "make check   static checks: ruff, mypy"
	@echo "make format  let ruff format the code"
	@echo "make clean   remove what was built, the environment too"

sweep: $(VENV)/.ready
	$(BIN)/dpsim sweep fusion-threshold

test: $(VENV)/.ready-dev
	$(BIN)/python -m pytest

check: $(VENV)/.ready-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.ready-dev
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find dpsim/ kernels experiments tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.ready: pyproject.toml | $(BIN)/python
	@echo "installing dpsim and an MPI library into $(VENV) ..."
	$(PIP) -e '.[mpich]'
	@touch $@

$(VENV)/.ready-dev: pyproject.toml | $(BIN)/python
	@echo "installing dpsim, an MPI library and the development tools into $(VENV) ..."
	$(PIP) -e '.[mpich,dev]'
	@touch $@ $(VENV)/.ready
