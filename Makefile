# make demo   sets up, then decodes with a small model over two processes
# make test   sets up, then runs every test that needs no GPU
# Another torch: make TORCH=torch==2.14.1 test. Another Python: make PYTHON=python3.12 test.
TORCH ?= torch==2.13.0
PYTHON ?= python3

# Inductor cannot link where torch lies under a path with a space; then .venv is a link.
BIN = "$$(readlink -f .venv)"/bin
ELSEWHERE = "$${HOME:-/tmp}/.cache/dcp_inductor/venv-$$(pwd | cksum | cut -d' ' -f1)"
PIP = $(BIN)/python -m pip --quiet --disable-pip-version-check
NATIVE = $(wildcard csrc/*/*.h csrc/*/*.cuh csrc/*/*.cpp csrc/*/*.cu \
    benchmarks/cuda/*.cu benchmarks/cuda/*.cuh tests/cuda/native/*.cu \
    tests/cuda/native/*.cuh tests/cuda/native/*.h)

.PHONY: setup demo test lint fix FORCE

setup: .venv/.ready

demo: setup
	@$(BIN)/python -m examples.mla_lm.demo

test: setup
	@$(BIN)/python -m pytest

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(NATIVE)
	$(BIN)/mypy

fix: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(NATIVE)

.venv/bin/python:
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo 'setup: Python 3.11 or newer is needed: make PYTHON=/path/to/python'; exit 1; }
	@echo 'setup: creating .venv'
	@case "$$PWD" in *' '*) mkdir -p $(ELSEWHERE) && ln -sfn $(ELSEWHERE) .venv;; esac
	@"$(PYTHON)" -m venv "$$(readlink -f .venv)"

# Changes only when TORCH does, so that another TORCH installs again.
.venv/.torch: .venv/bin/python FORCE
	@echo '$(TORCH)' | cmp -s - $@ || echo '$(TORCH)' > $@

.venv/.ready: .venv/.torch pyproject.toml setup.cfg $(wildcard csrc/*.py) $(NATIVE)
	@echo 'setup: installing $(TORCH); the first time this can download gigabytes'
	@$(PIP) install '$(TORCH)' 'setuptools>=77' wheel
	@echo 'setup: compiling the CPU library and installing dcp_inductor with test tools'
	@$(PIP) install --no-build-isolation --editable '.[dev]'
	@touch $@
