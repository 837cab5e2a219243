# Two commands are all a newcomer needs: `make demo` and `make test`. Both set everything up first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CODE := keyhole tests benchmarks scripts
PYTEST := TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

.PHONY: demo test check lint fix docs setup clean

demo: $(STAMP)
	$(BIN)/keyhole demo

test: lint
	$(PYTEST)

check: lint  # before every commit: the core tests of every package, in two minutes
	$(PYTEST) $(CORE)

lint: $(STAMP)
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/mypy

fix: $(STAMP)  # what ruff can repair by itself
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)

docs: $(STAMP)  # the page of settings, from their docstrings
	$(BIN)/python -m keyhole.config.docs > docs/config.md

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'keyhole needs Python 3.11 or newer: make PYTHON=python3.12 ...')"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[dev]"
	touch $(STAMP)

clean:
	rm -rf $(VENV) build dist *.egg-info
