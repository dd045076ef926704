# The two commands of the README: `make demo` and `make test`. Each makes .venv first and installs what is pinned.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
MODELS := $(VENV)/models

.PHONY: demo test gpu-tests lint style format bench measure results coverage rooms docs-demo clean

demo: $(VENV)/.demo
	$(BIN)/gradwire demo

# Three processes on two cores, because half of their time they wait for others that they have started; a file at a time
# to each, long ones first. Then the tests that are marked `alone`: links leave half of the cores idle, so tests that only
# compute, and mypy, run beside them by the scheduler's idle policy, which takes what the others leave and nothing more.
# Where the environment forbids to write compiled Python, each of a hundred processes would compile torch anew.
ALONE     := $(shell grep -rl --include='test_*.py' mark.alone tests)
COMPUTING := tests/arithmetic tests/codec tests/moments
FILES     := --max-worker-restart 1 --dist loadfile --no-loadscope-reorder
test: export PYTHONDONTWRITEBYTECODE =
test: style $(MODELS)/.made
	$(BIN)/pytest -n 3 $(FILES) -m 'not alone' $(COMPUTING:%=--ignore=%)
	@log=$$(mktemp); code=0; \
	chrt --idle 0 sh -c '$(BIN)/pytest -n 2 $(FILES) $(COMPUTING) && $(BIN)/mypy' > $$log 2>&1 & \
	$(BIN)/pytest -m alone $(ALONE) || code=1; \
	wait $$! || code=1; cat $$log; rm $$log; $(BIN)/python -m tests.gpu --since; exit $$code

# Where there is a GPU: the tests that need one, into benchmarks/results/gpu-tests.log. `make test` says how old that is.
gpu-tests: $(VENV)/.dev
	$(BIN)/python -m tests.gpu

lint: style
	$(BIN)/mypy

style: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Minutes on two cores; a GPU's: `python -m benchmarks gpu` where there is one. In an environment of its own: BackPACK
# brings a torchvision that does not load beside the CPU's torch, and wherever there is one transformers imports it.
bench:
	$(MAKE) --no-print-directory VENV=.venv-bench measure

measure: $(VENV)/.bench
	$(BIN)/python -m benchmarks cpu
	$(BIN)/python -m benchmarks docs

# docs/results.md and its pictures from experiments/results/, which `gradwire experiment` writes.
results: $(VENV)/.plots
	$(BIN)/python -m experiments

# docs/coverage.md: which moments of which models are exact.
coverage: $(VENV)/.dev $(MODELS)/.made
	$(BIN)/python -m benchmarks.coverage

# The extra `models`, beside the other packages: PyPI's torchvision is built for CUDA, and transformers, which imports it
# where it finds it, would fail beside a CPU's torch. benchmarks/zoo.py looks here.
$(MODELS)/.made: constraints.txt | $(BIN)/python
	$(BIN)/pip install --quiet --no-compile --no-deps --upgrade --constraint constraints.txt --target $(MODELS) torchvision timm
	touch $@

# The picture and the table of docs/architecture.md, from the source.
rooms: $(VENV)/.dev
	$(BIN)/python docs/rooms.py

# Measures the demo again (docs/results/demo.csv) and writes its table into the README.
docs-demo: $(VENV)/.demo
	$(BIN)/python docs/remake.py

# One stamp for each set of extras, so that the demo does not wait for the test tools.
$(VENV)/.%: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/pip install --quiet --no-compile --constraint constraints.txt --editable '.[$*]'
	touch $@

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "gradwire needs Python >= 3.10; set PYTHON=...")'
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo 'Python has no venv module: install it (Debian: python3-venv)'; exit 1; }

clean:
	rm -rf $(VENV) .venv-bench .import_linter_cache .mypy_cache .ruff_cache .pytest_cache .hypothesis
