# make sweep: install into .venv and run the fusion-threshold sweep.   make test: run the tests.
# Needs Python 3.11 or newer and make; PYTHON=python3.12 chooses another one.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Bytecode is written when a file is first imported, for of the many installed few ever are.
unexport PYTHONDONTWRITEBYTECODE
CHECK := -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: name one, as in PYTHON=python3.12")'
# The version whose buckets the tests know; it has no CUDA libraries, which are gigabytes.
TORCH := torch==2.13.0+cpu
# A wheel of 70 MB, whose signatures calls are held against; it needs no GPU and stays out of the tests' environment.
CUPY := cupy-cuda13x>=14
# Another NumPy than the one that fits CUDA's kernels: NUMPY=numpy==2.5.2. It stays until make clean.
NUMPY :=
# Where the wheel and the source distribution are built.
DIST := dist
# Where the attacks count what became of them.
ATTACKS := build/attacks
# Quiet twice: errors are shown, the package index's warnings are not.
INSTALL := -m pip --disable-pip-version-check --quiet --quiet install --no-compile --no-input
PIP := $(BIN)/python $(INSTALL)
# The packages of an extra alone, without dpsim and what it needs.
EXTRA = $$($(PYTHON) -c 'import tomllib; extras = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]; print(*extras["$(1)"])')

# The files with tests of a marker: importing all others would take as long as many tests.
marked = $(shell grep -rlE --include='test_*.py' 'mark\.$(1)\b' tests)

# What another processor may round, choose or reproduce otherwise.
PROCESSOR_TESTS := $(filter-out %cuda.py %cuda_gpu.py %cuda_launch.py %cuda_schedule.py,$(wildcard tests/kernels/test_*.py)) \
	tests/nn $(wildcard $(addprefix tests/runtime/test_,leaves.py runtime_training.py strategies.py zero1.py)) \
	tests/test_processor.py $(wildcard tests/harness/test_reproduc*.py)

# Where the lowest versions that pyproject.toml allows could compute something else, or lack what is called.
OLDEST := $(VENV)-oldest
OLDEST_TESTS := $(filter-out %cuda.py %cuda_gpu.py %cuda_launch.py %cuda_schedule.py,$(wildcard tests/kernels/test_*.py)) \
	tests/lowering tests/records tests/nn tests/report/test_report_files.py
DIGESTS := reproduce --devices 1,2 --algorithm ring,auto --steps 5

.PHONY: help sweep dist docs accuracy neighbours validate test test-avx2 test-oldest test-slow attacks test-torch test-cupy check gpu-check format clean

help:
	@echo "make sweep   which fusion threshold is fastest here? (under 2 minutes on 2 cores; it says where the report is)"
	@echo "make dist    build a source distribution and a wheel into dist/, and print the lines that install it, and pytest's plug-in"
	@echo "make docs    build the site of the documentation into build/docs (under a minute, as is installing MkDocs first)"
	@echo "make accuracy   how right are the predictions? many sweeps, at most an hour; continues where it was interrupted"
	@echo "make neighbours   what do sweeps say beside other processes? eight sweeps, under 20 minutes; continues where it was interrupted"
	@echo "make validate   predict what other people measured and published: reports/validation, README (under a minute)"
	@echo "make test    run the tests (6 to 10 minutes on 2 cores); NUMPY=numpy==VERSION installs another NumPy first"
	@echo "make test-avx2   run the kernels', layers' and training's tests as on a processor without AVX-512 (under 4 minutes)"
	@echo "make test-oldest   the core's tests, and digests as with the newest, on the lowest versions that are allowed"
	@echo "make test-slow   run long tests and every command of the documentation (about 15 minutes)"
	@echo "make attacks   200 kills, 20,000 damaged inputs, 1,000 odd command lines, with a table at the end (hours)"
	@echo "make test-torch   run the tests that need PyTorch, with its CPU build; TORCH=torch==VERSION names another one"
	@echo "make test-cupy   hold what is called on CuPy against its wheel (70 MB; no GPU is needed)"
	@echo "make check   static checks: ruff, mypy"
	@echo "make gpu-check   on a machine with a GPU: its benchmark and its tests, under 9 minutes; writes a file to send in,"
	@echo "                 here or in GPU_OUTPUT=folder"
	@echo "make gpu-check GPU_PYTHON=/path/to/python [WHEELS=folder]   the same without a network, on what that Python has"
	@echo "make format  let ruff format the code"
	@echo "make clean   remove what was built, the environment too"

sweep: $(VENV)/.ready
	$(BIN)/dpsim sweep fusion-threshold

accuracy: $(VENV)/.ready
	$(BIN)/python -m dpsim.experiments.accuracy

neighbours: $(VENV)/.ready
	$(BIN)/python -m dpsim.experiments.neighbours

validate: $(VENV)/.ready
	$(BIN)/python -m dpsim.validation --executor 2 --output reports/validation --json | $(BIN)/python -m dpsim.experiments.validation_page

test: $(VENV)/.ready-dev
	$(if $(NUMPY),$(PIP) "$(NUMPY)")
	$(BIN)/python -m pytest -m "not slow" -n 2 --dist loadfile

test-avx2: $(VENV)/.ready-dev
	OPENBLAS_CORETYPE=Haswell DPSIM_VECTORS=avx2 $(BIN)/python -m pytest -m "not slow" -n 2 --dist loadfile $(PROCESSOR_TESTS)

test-oldest: export NUMBA_CACHE_DIR = $(abspath $(OLDEST))/numba
test-oldest: $(VENV)/.ready $(OLDEST)/.ready
	rm -rf $(OLDEST)/digests $(OLDEST)/sweep
	NUMBA_CACHE_DIR= $(BIN)/dpsim $(DIGESTS) --output $(OLDEST)/digests
	$(OLDEST)/bin/dpsim $(DIGESTS) --against $(OLDEST)/digests --json > $(OLDEST)/compared.json
	@# Between library versions reproduce holds no difference against a run; here there must be none.
	$(BIN)/python -c 'import json, sys; sys.exit(any(json.load(sys.stdin)["summary"]["against"]["differences"]))' < $(OLDEST)/compared.json
	$(OLDEST)/bin/dpsim sweep fusion-threshold --budget 5s --output $(OLDEST)/sweep
	@# Old packages call what the newest of theirs deprecate.
	$(OLDEST)/bin/python -m pytest -W ignore::DeprecationWarning -m "not slow" -n 2 --dist loadfile $(OLDEST_TESTS)

test-slow: $(VENV)/.ready-dev
	$(BIN)/python -m pytest -m slow -n 2 --dist worksteal $(call marked,slow)

# More than an hour: kills of all commands, damaged inputs and odd command lines. The kills continue where they were interrupted.
attacks: $(VENV)/.ready-torch
	$(BIN)/python -m dpsim.experiments.stress.kills --parts readers,commands,kills --output $(ATTACKS)

test-torch: $(VENV)/.ready-torch
	$(BIN)/python -m pytest -m torch -n 2 --dist worksteal $(call marked,torch)

test-cupy: $(VENV)-cupy/.ready
	PYTHONPATH="$(abspath $(VENV)-cupy)" $(BIN)/python -m pytest -m cupy -n 2 $(call marked,cupy)

check: $(VENV)/.ready-dev
	@status=0; set -x; $(BIN)/ruff check . || status=1; $(BIN)/ruff format --check . || status=1; $(BIN)/mypy || status=1; \
	exit $$status

# With GPU_PYTHON nothing is fetched: its packages are used as they are, beside the wheels in the folder WHEELS. The
# record goes to the folder GPU_OUTPUT.
ifdef GPU_PYTHON
gpu-check:
	@$(GPU_PYTHON) $(CHECK)
	@$(GPU_PYTHON) experiments/gpu_check/machine_python.py $(VENV)-gpu $(if $(WHEELS),--wheels "$(WHEELS)") \
	$(if $(GPU_OUTPUT),-- --output "$(GPU_OUTPUT)")
else
gpu-check:
	@$(PYTHON) $(CHECK)
	@extra=$$($(PYTHON) -I dpsim/comm/cuda/driver.py) && $(MAKE) --no-print-directory $(VENV)/.ready-$$extra
	$(BIN)/python -m dpsim.experiments.gpu_check $(if $(GPU_OUTPUT),--output "$(GPU_OUTPUT)")
endif

dist: $(VENV)/.ready
	$(PIP) build
	@mkdir -p $(DIST)
	{ $(BIN)/python -m build --outdir $(DIST) . && $(BIN)/python -m build --wheel --outdir $(DIST) dpsim/testing; } > $(DIST)/build.log \
	|| { cat $(DIST)/build.log; exit 1; }
	@rm -rf dpsim/testing/build dpsim/testing/*.egg-info
	@echo "to install it into another environment, with an MPI library: pip install '$$(ls -t $(abspath $(DIST))/dpsim_train-*.whl | head -1)[mpich]'"
	@echo "to install pytest's plug-in where you train:                 pip install '$$(ls -t $(abspath $(DIST))/dpsim_pytest-*.whl | head -1)'"

docs: $(VENV)-docs/.ready
	NO_MKDOCS_2_WARNING=1 $(VENV)-docs/bin/mkdocs build --quiet
	@echo "open build/docs/index.html: it is read and searched without a network"

format: $(VENV)/.ready-dev
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(OLDEST) $(VENV)-cupy $(VENV)-docs $(VENV)-gpu $(VENV)-gpu.lock build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find dpsim/ kernels experiments tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) $(CHECK)
	$(PYTHON) -m venv $(VENV)

$(VENV)/.ready: pyproject.toml | $(BIN)/python
	@echo "installing dpsim and an MPI library into $(VENV) ..."
	$(PIP) -e '.[mpich]'
	@touch $@

$(VENV)/.ready-dev: pyproject.toml | $(BIN)/python
	@echo "installing dpsim, an MPI library and the development tools into $(VENV) ..."
	$(PIP) -e '.[mpich,dev,ptx]'
	@touch $@ $(VENV)/.ready

$(OLDEST)/.ready: pyproject.toml | $(BIN)/python
	@echo "installing the lowest versions that pyproject.toml allows into $(OLDEST) ..."
	$(BIN)/python -m venv $(OLDEST)
	$(BIN)/python -c 'import tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
	print(*(project["dependencies"] + project["optional-dependencies"]["mpich"]), sep="\n")' | sed 's/>=/==/' > $(OLDEST)/lowest.txt
	$(subst $(BIN),$(OLDEST)/bin,$(PIP)) -c $(OLDEST)/lowest.txt -e '.[mpich]' hypothesis pytest pytest-timeout pytest-xdist
	@touch $@

$(VENV)/.ready-torch: $(VENV)/.ready-dev
	@echo "installing $(TORCH) into $(VENV) ..."
	$(PIP) "$(TORCH)"
	@touch $@

$(VENV)-cupy/.ready: pyproject.toml | $(VENV)/.ready-dev
	@echo "fetching $(CUPY) into $(VENV)-cupy ..."
	$(PIP) --no-deps --upgrade --target $(VENV)-cupy "$(CUPY)"
	@touch $@

$(VENV)-docs/.ready: pyproject.toml
	@$(PYTHON) $(CHECK)
	@echo "installing MkDocs into $(VENV)-docs ..."
	$(PYTHON) -m venv $(VENV)-docs
	$(VENV)-docs/bin/python $(INSTALL) $(call EXTRA,docs)
	@touch $@

$(VENV)/.ready-cuda12 $(VENV)/.ready-cuda13: pyproject.toml | $(BIN)/python
	@echo "installing dpsim, an MPI library, numba-cuda, CuPy, NCCL and the tests' tools into $(VENV) ..."
	$(PIP) -e '.[mpich,dev,$(@:$(VENV)/.ready-%=%)]'
	@touch $@ $(VENV)/.ready
