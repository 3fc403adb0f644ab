# `make demo` runs the main job, `make check` the quick tests, `make test` those that a change needs,
# `make test-all` all; each sets up what is missing first.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin

FUZZ_MINUTES ?= 60
SIMULATED_FUZZ_MINUTES ?= 20
# Those supported beside the one that is installed (patches/compat.py).
OTHER_RELEASES ?= 0.5.22
# All tests of one server go to one worker, and those that take longest come first. Two workers a
# core: a test often waits for its server.
PYTEST := $(BIN)/python -m pytest -n 4 --dist loadgroup --no-loadscope-reorder --durations 20

# Compiled once, and not in each of some hundred processes.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-all check lint test-release two-servers dist sbom site gpu-check lock clean

demo: $(VENV)/ready
	$(BIN)/sage-sched demo

check: lint
	$(PYTEST) -m "not server and not slow and not long"

test: lint
	$(PYTEST) -m "not long"

# All that is here, of which some takes a network: for a release, and every night.
test-all: lint
	$(PYTEST)
	$(BIN)/python -m tests.bench.simulator.fuzz --seed $$(date +%j)0000 \
		--minutes $(SIMULATED_FUZZ_MINUTES)
	$(BIN)/python -m tests.engine.fuzz --seed $$(date +%j) --minutes $(FUZZ_MINUTES)
	$(BIN)/python -m tests.checks.bugs
	$(MAKE) two-servers
	for release in $(OTHER_RELEASES); do $(MAKE) test-release RELEASE=$$release || exit; done

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The tests that use SGLang, on another release: make test-release RELEASE=0.5.22
test-release: $(VENV)/ready
	$(BIN)/python -m tests.checks.canary --release $(RELEASE)
	PYTHONPATH=$(CURDIR)/results/releases/$(RELEASE) $(PYTEST) tests/patches tests/engine

# Two servers behind a router: docs/examples/two-servers.sh.
two-servers: $(VENV)/ready
	$(PYTHON) -m venv results/router
	results/router/bin/pip install --quiet smg==1.13.0
	$(BIN)/python -m tests.checks.two_servers --smg results/router/bin/smg

# Source distribution and wheel, in dist/.
dist: $(VENV)/ready
	rm -rf dist build
	$(BIN)/python -c 'from setuptools.build_meta import build_sdist; build_sdist("dist")'
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation -w dist dist/*.tar.gz

# What is installed, with licences: results/sbom.json and results/licences.md.
sbom: $(VENV)/ready
	$(PYTHON) -m venv results/sbom
	results/sbom/bin/pip install --quiet cyclonedx-bom==7.5.0 pip-licenses==5.5.5
	results/sbom/bin/cyclonedx-py environment -o results/sbom.json $(BIN)/python
	results/sbom/bin/pip-licenses --python $(BIN)/python --order license --format markdown \
		--output-file results/licences.md

# The site, as `make check` builds it in a test: results/site.
site: $(VENV)/ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# On a host with a GPU (docs/benchmarking.md); elsewhere it says why nothing is checked.
gpu-check: $(VENV)/ready
	$(BIN)/python -m tests.checks.gpu

# Each step leaves a mark, so a broken-off set-up goes on where it stopped; pip keeps what it has
# downloaded. torch comes first, as the build that this host's index has for its version, with what it
# needs (CUDA libraries, if it is a CUDA build); asked for a hash, pip would take the public index's.
# Of the others pip refuses a file whose hash is not in requirements.txt, which is complete.
$(VENV)/ready: $(VENV)/packages pyproject.toml
	$(BIN)/python -m pip install --no-deps --no-build-isolation --quiet --editable .
	touch $@

$(VENV)/packages: $(VENV)/python requirements.txt
	@echo "Installing $$(grep -c == requirements.txt) packages (about 3 GB) ..."
	$(BIN)/python -m pip install $$(grep -o '^torch==[^ ]*' requirements.txt)
	$(BIN)/python -m pip install --no-deps --require-hashes -r requirements.txt
	touch $@

$(VENV)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python >= 3.11 is needed: make PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv $(VENV)
	touch $@

# Writes down the versions that are installed now, with hashes.
lock: $(VENV)/ready
	$(BIN)/python -m tests.checks.lock

clean:
	rm -rf $(VENV) results dist build
