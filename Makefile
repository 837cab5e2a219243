# Two commands are all a newcomer needs: `make demo` and `make test`. Both set everything up first.
PYTHON ?= python3
VENV := .venv
BEFORE_5 := .venv-4.57
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CODE := keyhole tests benchmarks scripts
# What `make check` runs: of every package the tests that are quick, in the order of the layers
CORE := tests/test_layers.py tests/test_docs.py tests/test_configs.py tests/test_errors.py tests/machine tests/disk tests/ranks/test_single.py \
	tests/ops/noise tests/ops/rounding tests/ops/test_adam.py tests/ops/lsp/test_projector.py tests/ops/test_loss.py \
	tests/offload/test_engine.py tests/offload/test_workers.py tests/model/structure tests/model/weights tests/model/backward/test_tape.py \
	tests/model/forward/test_lockstep.py tests/model/forward/test_head.py tests/model/forward/test_memory.py \
	tests/methods/test_table.py tests/methods/zo/test_write_back.py tests/methods/lomo/test_adalomo.py tests/methods/lsp/test_fit.py \
	tests/methods/lsp/test_memory.py tests/methods/adam_offload/test_exchange.py tests/methods/adam_offload/test_state.py \
	tests/methods/apollo_mini tests/methods/baselines/test_galore.py tests/plan tests/loading/test_load.py tests/data/test_examples.py tests/data/test_tokens.py \
	tests/data/test_batches.py tests/checkpoint/test_state.py tests/checkpoint/test_journal.py tests/eval/test_tasks.py \
	tests/eval/test_choices.py tests/config/test_types.py tests/config/test_rules.py tests/report tests/training/test_start_block.py tests/training/test_resume.py \
	tests/training/test_rundir.py tests/training/test_metrics.py tests/demo/test_report.py tests/compare/test_file.py \
	tests/compare/test_page.py tests/bench/test_cases.py tests/cli/test_arguments.py tests/cli/test_train.py \
	tests/hostile/test_settings.py tests/pages tests/hf/test_refusals.py tests/hub/test_push.py tests/harness/test_run.py
# Bytecode is kept whatever the environment says: both workers, and every process that a test starts, import the same files
PYTEST := PYTHONDONTWRITEBYTECODE= TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

.PHONY: demo test check matrix run-tests lint style types fix docs setup clean

demo: $(STAMP)
	$(BIN)/keyhole demo

test: style  # types are checked beside the tests: the first time takes half a minute of one core
	$(MAKE) --no-print-directory -j 2 types run-tests

check: style  # before every commit: the core tests of every package, in two minutes
	$(MAKE) --no-print-directory -j 2 types run-tests TESTS="$(CORE)"

matrix: $(STAMP)  # of properties over families, methods and dtypes, the cases that `make test` leaves out
	-$(MAKE) --no-print-directory $(BEFORE_5)/.installed
	$(PYTEST) -m matrix

$(BEFORE_5)/.installed: constraints-4.57.txt  # an environment with the last Transformers before 5; without it, its cases skip
	test -x $(BEFORE_5)/bin/python || $(PYTHON) -m venv $(BEFORE_5)
	$(BEFORE_5)/bin/python -m pip install -q -c constraints-4.57.txt torch transformers peft
	touch $@

run-tests: $(STAMP)
	$(PYTEST) $(TESTS)

lint: style types

style: $(STAMP)
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)

types: $(STAMP)
	$(BIN)/mypy

fix: $(STAMP)  # what ruff can repair by itself
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)

docs: $(STAMP)  # the page of settings, from their docstrings; the names of the library, from the table of methods
	$(BIN)/python -m keyhole.config.docs > docs/config.md
	$(BIN)/python -m scripts.stub > keyhole/__init__.pyi

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'keyhole needs Python 3.11 or newer: make PYTHON=python3.12 ...')"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[dev]"
	touch $(STAMP)

clean:
	rm -rf $(VENV) $(BEFORE_5) build dist *.egg-info
