# `make demo` and `make test` do all the set-up they need; a second run starts in seconds.
PYTHON ?= python3
VENV   := .venv
PY     := $(VENV)/bin/python
STAMP  := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help setup demo test nightly lint clean

help:
	@echo "make demo   set up, then multiply with the real kernels (on the GPU, or in the emulator)"
	@echo "make test   set up, then run the tests this machine can run, a sample of those with many cases"
	@echo "make nightly   the same with every case, and the slow tests"
	@echo "make lint   ruff, ruff format, mypy"

$(STAMP): pyproject.toml constraints.txt
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	# The emitter and headers only: its other parts want a cuda-python that does not go with this cuda-bindings.
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps nvidia-cutlass
	@touch $@

setup: $(STAMP)

demo: $(STAMP)
	$(PY) -m cutegemm.demo

test: $(STAMP)
	$(PY) -m pytest -n auto --maxprocesses 16 --dist worksteal --durations 10

nightly: $(STAMP)
	$(PY) -m pytest -n auto --maxprocesses 16 --dist worksteal --durations 10 --exhaustive -m ''

lint: $(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache build *.egg-info
