# Each target makes its own .venv from nothing; only the package index is needed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test test-all check bench docs clean

demo: $(VENV)/installed
	$(BIN)/python examples/demo.py

test: $(VENV)/installed
	$(BIN)/python scripts/check.py

test-all: $(VENV)/installed
	$(BIN)/python scripts/check.py --all-cases

check: test

bench: $(VENV)/installed
	$(BIN)/python benchmarks/run_all.py

docs: $(VENV)/installed
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build/html

# torch first and alone: any later requirement then finds it satisfied and pulls no other build.
$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) runs docs/_build
