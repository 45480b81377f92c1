# Everything a newcomer needs: `make demo` shows the main job, `make test` proves the code.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# Where it is set, every process that the tests start would compile all it imports once more.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install test quick lint types tests quick-tests demo docs fuzz crash-test clean

install: $(VENV)/everything

# The constraints file pins torch to a build that needs no accelerator; an unpinned install may pull gigabytes. What is
# never imported is never compiled.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/core: $(BIN)/python pyproject.toml constraints.txt
	$(PIP) --editable .
	touch $@

$(VENV)/everything: $(BIN)/python pyproject.toml constraints.txt
	$(PIP) --editable ".[dev]"
	$(BIN)/python tools/torchvision_operators.py
	touch $(VENV)/core $@

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/mypy

# Pages are tested in a real browser. Where it may, as root on Debian, `make test` installs one; elsewhere those tests skip.
.PHONY: browser
browser:
	@for name in chromium chromium-browser google-chrome; do command -v $$name >/dev/null && exit 0; done; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  export DEBIAN_FRONTEND=noninteractive; get="apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core"; \
	  $$get >/dev/null 2>&1 || { apt-get update -qq && $$get; } >/dev/null 2>&1 || echo "chromium could not be installed"; \
	fi

# A file at a time, since its tests share what they set up; many wait for processes they started, so a third worker fills
# what that leaves of two cores.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist loadfile

test:
	$(MAKE) --no-print-directory -j 2 lint browser
	$(MAKE) --no-print-directory -j 2 types tests

tests: install
	$(PYTEST)

# Lint, types and the tests that need neither a training nor a process of their own.
quick: lint
	$(MAKE) --no-print-directory -j 2 types quick-tests

quick-tests: install
	$(PYTEST) -m "not slow"

# Damaged and hostile files through every door, each in a process of its own. What fails is kept in tests/fuzz/corpus.
FUZZ_INPUTS ?= 5000
FUZZ_SEED ?= 1
fuzz: install
	$(BIN)/python tests/fuzz/fuzz.py --inputs $(FUZZ_INPUTS) --seed $(FUZZ_SEED)

# Faults of every kind in real trainings, which must end as if nothing had happened. The seed is printed.
CRASH_FAULTS ?= 200
CRASH_TRAININGS ?= 35
CRASH_SEED ?= 1
crash-test: install
	OMP_NUM_THREADS=1 $(BIN)/python tests/crash/crash_test.py --faults $(CRASH_FAULTS) --trainings $(CRASH_TRAININGS) --seed $(CRASH_SEED)

demo: $(VENV)/core
	$(BIN)/anechoic demo

# The site, which opens from disk: site/index.html.
docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

clean:
	rm -rf $(VENV) site .mypy_cache .ruff_cache .pytest_cache
