# Everything sets itself up: `make demo` and `make test` first make the virtual environment and build
# the extension where that has not been done yet, and only then.
#
#   make PYTHON=python3.12 test       another Python (3.11 or newer)
#   make TORCH='torch==2.13.0 --index-url URL' test
#                                     the CPU build of torch, much smaller where the default has CUDA
#   make test ARGS='-k allocator'     arguments for pytest
#   make test WORKERS=0               all tests in one process, one after another

PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv
ARGS ?=
# Test processes; each trains on up to two cores.
WORKERS ?= 2

BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed.stamp
BUILT := $(VENV)/built.stamp
SOURCES := $(shell find allocator_ext -name "*.cpp")
HEADERS := $(shell find allocator_ext -name "*.h")
TIDY := $(SOURCES) $(HEADERS) $(shell find tests benchmarks -name "*.cpp" -o -name "*.h")
PACKAGES := waterflow allocator_ext executor partitioner models cluster benchmarks
# Ninja would start more compilers than there are cores, and each of them takes a gigabyte.
export MAX_JOBS ?= $(shell nproc)
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help setup demo test soak lint types imports docs wheel as_installed bench clean
.DELETE_ON_ERROR:

help:
	@echo 'make demo    train a dozen trials together and check them against the eager loop'
	@echo 'make test    run the tests'
	@echo 'make soak    the tests that take many minutes'
	@echo 'make lint    ruff, mypy, import-linter, clang-format, and the documentation'
	@echo 'make docs    the documentation as pages, in build/site'
	@echo 'make wheel   a wheel in dist/, tried in an environment of its own'
	@echo 'make bench   run the benchmarks'
	@echo 'make clean   remove what was built and the virtual environment'

setup: $(BUILT)

demo: $(BUILT)
	$(BIN)/waterflow demo

test: $(BUILT)
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

soak: $(BUILT)
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m soak $(ARGS)

lint: $(BUILT) types imports docs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(TIDY)

# The tools below do not follow the mapping of folders to packages: they get a copy of the sources
# that lies as installed.
as_installed: $(BUILT)
	rm -rf build/types
	$(BIN)/python setup.py --quiet build_py --build-lib build/types

types: as_installed
	cd build/types && $(abspath $(BIN))/mypy --config-file $(CURDIR)/pyproject.toml \
	  --cache-dir $(CURDIR)/.mypy_cache -p waterflow

# Who may import whom is in pyproject.toml.
imports: as_installed
	cd build/types && $(abspath $(BIN))/lint-imports --no-logo --no-cache \
	  --config $(CURDIR)/pyproject.toml

# Warnings are errors: a link into nothing, a parameter that a docstring does not know.
docs: as_installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

# For the torch that it is built beside. Tried without the checkout, which Python would find first.
wheel: $(BUILT)
	rm -rf dist
	$(BIN)/python -m pip wheel --quiet --no-build-isolation --no-deps --wheel-dir dist .
	PYTHON='$(PYTHON)' TORCH='$(TORCH)' .ci/try_wheel dist/*.whl

bench: $(BUILT)
	$(BIN)/python -m benchmarks.dispatch
	$(BIN)/python -m benchmarks.throughput
	$(BIN)/python -m benchmarks.tape
	$(BIN)/python -m benchmarks.capture
	$(BIN)/python -m benchmarks.allocator

clean:
	rm -rf $(VENV) build dist waterflow.egg-info waterflow-report* allocator_ext/*.so
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis .benchmarks .sanitizers

# torch first and pinned, then no build isolation: otherwise pip would fetch a torch of its own
# choice, gigabytes of it, a second time for the build.
$(INSTALLED): pyproject.toml setup.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
	  "waterflow needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	@command -v $${CXX:-c++} >/dev/null || \
	  { echo 'waterflow needs a C++ compiler: install g++ or clang++' >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo '--- installing torch and the build tools'
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet 'setuptools>=77' wheel ninja
	@echo '--- installing waterflow: building its extension takes a few minutes'
	$(BIN)/python -m pip install --quiet --no-build-isolation -e '.[dev]'
	@# As pip does with what it copies: also where PYTHONDONTWRITEBYTECODE is set, each process would
	@# take half a second to compile these.
	$(BIN)/python -m compileall -q $(PACKAGES)
	@touch $(INSTALLED)

# The installation has built the extension; from then on only what changes is compiled again.
$(BUILT): $(INSTALLED) $(SOURCES) $(HEADERS)
	@if [ -n "$$(find $(SOURCES) $(HEADERS) -newer $(INSTALLED))" ]; then \
	  echo '--- the sources of the extension have changed: building it'; \
	  $(BIN)/python setup.py --quiet build_ext --inplace || exit 1; \
	fi
	@touch $(BUILT)
