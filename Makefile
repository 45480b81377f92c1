# `make demo` shows the main use, `make quick` and `make test` check the code, `make docs` builds the site.
# On Linux pip usually finds the CUDA build of torch, several gigabytes. TORCH=cpu or TORCH=cuda fails unless that build
# arrives; TORCH=as-is takes any. TORCH_INDEX is the address that PyTorch's own selector (pytorch.org) prints.
TORCH ?= as-is
TORCH_INDEX ?=
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# If it is set, every process that the tests start compiles its imports again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install test quick lint types tests quick-tests matrix demo docs fuzz cache-law crash-test clean

install: $(VENV)/everything

# The constraints file pins every version. Byte code is compiled on first import.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/core: $(BIN)/python pyproject.toml constraints.txt
	$(if $(TORCH_INDEX),$(PIP) torch --index-url $(TORCH_INDEX))
	$(PIP) --editable .
	@$(BIN)/python tools/torch_build.py $(TORCH)
	touch $@

$(VENV)/everything: $(VENV)/core
	$(PIP) --editable ".[dev]"
	$(BIN)/python -m anechoic.adapters.torchvision_operators
	touch $@

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tools/words.py

types: install
	$(BIN)/mypy

# Pages are tested in a browser. As root on Debian `make test` installs one; elsewhere, without a browser, those tests are skipped.
.PHONY: browser
browser:
	@for name in chromium chromium-browser google-chrome; do command -v $$name >/dev/null && exit 0; done; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  export DEBIAN_FRONTEND=noninteractive; get="apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core"; \
	  $$get >/dev/null 2>&1 || { apt-get update -qq && $$get; } >/dev/null 2>&1 || echo "chromium could not be installed"; \
	fi

# One file per worker, since its tests share fixtures. Many tests wait for processes, so three workers use two cores well.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist loadfile

test:
	$(MAKE) --no-print-directory -j 2 lint browser
	$(MAKE) --no-print-directory -j 2 types tests

tests: install
	$(PYTEST)

# Lint, types and the tests that are not marked slow.
quick: lint
	$(MAKE) --no-print-directory -j 2 types quick-tests

quick-tests: install
	$(PYTEST) -m "not slow"

# The tests of `make quick` on other versions of Python and torch; CONTRIBUTING.md has the table.
matrix:
	$(PYTHON) tools/matrix.py $(MATRIX)

# Corrupted and malicious files for every reader, each in a subprocess. Failing inputs are stored in tests/fuzz/corpus.
FUZZ_INPUTS ?= 8000
FUZZ_SEED ?= 1
fuzz: install
	$(BIN)/python tests/fuzz/fuzz.py --inputs $(FUZZ_INPUTS) --seed $(FUZZ_SEED)

# With a warm, a cold and no cache every command returns the same bits, whatever happens to data, weights and cache.
LAW_CASES ?= 600
LAW_SEED ?= 1
cache-law: install
	OMP_NUM_THREADS=1 TQDM_DISABLE=1 $(BIN)/python tests/storage/cache_law.py --cases $(LAW_CASES) --seed $(LAW_SEED)

# Fault injection in real trainings, which must end with the same bytes as undisturbed ones. The seed is printed.
CRASH_FAULTS ?= 300
CRASH_TRAININGS ?= 50
CRASH_SEED ?= 1
crash-test: install
	OMP_NUM_THREADS=1 $(BIN)/python tests/crash/crash_test.py --faults $(CRASH_FAULTS) --trainings $(CRASH_TRAININGS) --seed $(CRASH_SEED)

demo: $(VENV)/core
	$(BIN)/anechoic demo

# The site opens from disk: site/index.html.
docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

clean:
	rm -rf $(VENV) .matrix site .mypy_cache .ruff_cache .pytest_cache
