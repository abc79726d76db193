# Every target sets up what it needs: on a fresh machine `make demo` and `make test` are the only commands.
# `make TARGET PYTHON=python3` uses that interpreter as it is, without a virtual environment or a network.

VENV   := .venv
PYTHON ?= $(VENV)/bin/python
# Arguments of pytest or of the script: make test ARGS="tests/distributed/test_mesh.py -x"
ARGS   ?=
# Files of tests at a time: ranks wait for each other more than they compute. JOBS=0 is one after the other.
JOBS   ?= 2

READY  := $(if $(filter $(VENV)/bin/python,$(PYTHON)),$(VENV)/.installed)

# Ranks share the cores: one thread each. The examples and the tests are imported from here.
export OMP_NUM_THREADS ?= 1
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))

# Faults: make faults N=200 FIRST=1000
N      ?= 50
FIRST  ?= 0

.PHONY: faults nodes soak help demo test check thorough lint types docs gpu clean
.DEFAULT_GOAL := help

help:  ## Show this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /|/' | awk -F'|' '{printf "  make %-7s %s\n", $$1, $$2}'

demo: $(READY)  ## Train a Vision Transformer on handwritten digits, tensor 2 x pipeline 2, on the CPU
	$(PYTHON) -m lightning_hybrid demo

test: $(READY)  ## Run the tests
	$(PYTHON) -m pytest -n $(JOBS) --dist loadfile $(ARGS)

check: lint types docs test  ## Run everything that a change must pass

# The lists of which every run takes a part, and Lightning's own tests: make thorough LIGHTNING_TESTS=/path/to/lightning
thorough: $(READY)  ## Run the whole of every list, Lightning's own tests and faults: hours, before a release
	$(PYTHON) -m pytest -m thorough -n $(JOBS) --dist loadfile $(ARGS)
	$(PYTHON) -m tests.conformance
	$(PYTHON) -m tests.faults $(N) --first $(FIRST) --jobs $(JOBS)

faults: $(READY)  ## Inject N random faults into real runs, and print how each ended
	$(PYTHON) -m tests.faults $(N) --first $(FIRST) --jobs $(JOBS)

nodes: $(READY)  ## Train on several machines, made of network namespaces: needs root
	$(PYTHON) -m pytest -m "" -rs tests/nodes

soak: $(READY)  ## Train for 2,000 steps of changing shapes: memory, threads and files stay flat
	$(PYTHON) -m tests.faults.soak

lint: $(READY)  ## Check style and formatting
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -c "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_logo=True))"
	$(PYTHON) docs/plain_words.py

types: $(READY)  ## Check types
	$(PYTHON) -m mypy

docs: $(READY)  ## Make the site, into build/docs
	$(PYTHON) docs/draw_house.py --check
	$(PYTHON) docs/write_reference.py --check
	$(PYTHON) -m sphinx --builder html --fail-on-warning --keep-going --quiet docs build/docs

# make gpu ARGS="--minutes 20"; without a network: make gpu PYTHON=python3 PYTHONPATH=/folder/with/packages
gpu: $(READY)  ## Answer the questions that only a GPU answers; results go to benchmarks/gpu/results
	$(PYTHON) -m benchmarks.gpu $(ARGS)

clean:  ## Remove everything that these targets made
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache lightning_logs checkpoints
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(VENV)/bin/python || python3 -m venv $(VENV)
	$(VENV)/bin/python -m pip install -c constraints.txt -e ".[dev,docs,examples]"
	touch $@
