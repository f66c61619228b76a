# Two commands: `make demo` and `make test`. Each makes .venv on first use and then does its job.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test test-all check clean
demo: $(STAMP)
	@PATH="$(CURDIR)/$(BIN):$$PATH" sh examples/demo.sh

test: $(STAMP)
	$(BIN)/python -m pytest -m "not slow"

# What is longer than CI allows; the record is committed.
test-all: test
	@mkdir -p bench/records
	@{ date -u +%Y-%m-%d; $(BIN)/shardwise --version; $(BIN)/python -c 'import torch; print("torch", torch.__version__)'; } > bench/records/slow-tests.txt
	$(BIN)/python -m pytest -m slow -v --durations=0 --no-header >> bench/records/slow-tests.txt || { cat bench/records/slow-tests.txt; exit 1; }
	@cat bench/records/slow-tests.txt

check: $(STAMP)
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/structure tests/pure

$(STAMP): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "error: $(PYTHON) is older than 3.11; make PYTHON=python3.12 takes another" >&2; exit 3; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (torch is about 3 GB; once)"
	@$(BIN)/python -m pip install --quiet --require-hashes -r requirements.lock
	@$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

clean:
	rm -rf $(VENV) build runs
