# Everything a newcomer needs: `make demo` shows the main job, `make test` proves the code.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: install test lint demo clean

install: $(VENV)/installed

# The constraints file pins torch to a build that needs no accelerator; an unpinned install may pull gigabytes.
$(VENV)/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	$(BIN)/python tools/torchvision_operators.py
	touch $@

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadgroup

demo: install
	$(BIN)/anechoic demo

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache
