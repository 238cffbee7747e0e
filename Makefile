# Everything runs in .venv, which the first target that needs it makes. Needs: make and Python 3.11 or newer.

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
SOURCES := $(wildcard extproc bench tests)

# The first interpreter that is new enough; a name on PATH may be a shim that cannot run.
PYTHON ?= $(shell for name in python3 python3.14 python3.13 python3.12 python3.11 python; do \
	"$$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$name" && break; done)

.DEFAULT_GOAL := help
.PHONY: help demo test lint typecheck bench soak lock clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(READY) ## Run a real Envoy, simulated engines and Tokenlane on this machine
	@$(BIN)/tokenlane demo $(ARGS)

test: $(READY) ## Run all tests; the core must be covered to the last branch. ARGS picks some
	@$(BIN)/coverage run -m pytest $(ARGS)
	@$(if $(ARGS),:,$(BIN)/coverage report --include='extproc/core/*' --fail-under=100)

lint: $(READY) ## Check style, format and import directions
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/lint-imports

typecheck: $(READY) ## Check types
	@$(BIN)/mypy $(SOURCES)

bench: $(READY) ## Measure what admission costs a request, and what a count costs
	@$(BIN)/python -m bench.latency $(ARGS)
	@$(BIN)/python -m bench.counting $(ARGS)

soak: $(READY) ## Fuzz bytes to verdicts, then break engines, Envoy and Tokenlane under load for minutes
	@TOKENLANE_FUZZ_INPUTS=201000 $(BIN)/python -m pytest --quiet tests/service/test_fuzz.py
	@$(BIN)/python -m bench.soak $(ARGS)

# Pins stay as they are where they can; `make lock ARGS=--upgrade` moves them all.
LOCK := uv pip compile pyproject.toml --no-config --quiet --universal --python-version 3.11 --generate-hashes \
	--no-annotate --no-emit-index-url --no-emit-find-links --custom-compile-command 'make lock'

lock: $(READY) ## Pin dependencies anew after a change of pyproject.toml
	@$(BIN)/$(LOCK) $(ARGS) --extra fast --extra encodings --output-file requirements/runtime.txt
	@$(BIN)/$(LOCK) $(ARGS) --extra demo --extra encodings --extra fast --extra mistral --group dev --output-file requirements/dev.txt

clean: ## Remove caches and build results; .venv stays
	@rm -rf build dist .coverage .coverage.* .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	@find extproc $(wildcard bench tests) -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): requirements/dev.txt pyproject.toml
	@test -n "$(PYTHON)" || { echo "Tokenlane needs Python 3.11 or newer, and none is on PATH; PYTHON=/path/to/python names another." >&2; exit 1; }
	@echo "Setting up $(VENV) with $$($(PYTHON) --version): about a minute, once." >&2
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes --requirement requirements/dev.txt
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@
