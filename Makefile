# The two commands of the README: `make demo` and `make test`. Each makes .venv first and installs what is pinned.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin

.PHONY: demo test lint format bench results docs-demo clean

demo: $(VENV)/.demo
	$(BIN)/gradwire demo

# Three processes on two cores, because half of their time they wait for others that they have started; a file at a time
# to each, long ones first; then, with nothing beside them, the tests that are marked `alone`. mypy takes one core for
# twenty seconds: it runs beside the first of them, and both must succeed. Where the environment forbids to write
# compiled Python, each of a hundred processes would compile torch anew.
ALONE := $(shell grep -rl --include='test_*.py' mark.alone tests)
test: export PYTHONDONTWRITEBYTECODE =
test: style
	$(BIN)/mypy & $(BIN)/pytest -n 3 --max-worker-restart 1 --dist loadfile --no-loadscope-reorder -m 'not alone' && wait $$!
	$(BIN)/pytest -m alone $(ALONE)

lint: style
	$(BIN)/mypy

style: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Minutes on two cores; a GPU's: `python -m benchmarks gpu` where there is one.
bench: $(VENV)/.bench
	$(BIN)/python -m benchmarks cpu
	$(BIN)/python -m benchmarks docs

# docs/results.md and its pictures from experiments/results/, which `gradwire experiment` writes.
results: $(VENV)/.bench
	$(BIN)/python -m experiments

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
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
