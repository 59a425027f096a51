# Everything from a bare checkout on Debian 12: `make demo` runs the example, `make test` runs the tests.
# Missing Debian packages (python3-venv, rabbitmq-server, postgresql) are installed where we are root or sudo asks for no password;
# otherwise the command to run is printed and make ends with status 2.

PYTHON ?= /usr/bin/python3
ARGS ?=

BIN := .venv/bin
INSTALLED := .venv/.installed

# Whole systems, and tests that kill, cut and fill what they stand on, two at a time; the others wait for servers part of their time, and are run three
# at a time. Files go as they are named here, then by name: those with one long test come early, and short ones (tests/unit, poison) last, so that no
# processor is idle at the end.
ALONE := tests/integration/faults tests/e2e tests/integration/dead_letters tests/integration/poison
BY_FILE := --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help install packages demo test test-long check bench schemas lock clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(INSTALLED) ## Make .venv with the locked dependencies and this checkout in it

demo: install ## Run the example from a CSV to enriched rows, on servers of its own
	cd examples/leads && ../../$(BIN)/rowmill dev up --install && ../../$(BIN)/python demo.py $(ARGS)

test: install packages ## Run the tests (ARGS="tests/unit -k name" for some)
ifeq ($(strip $(ARGS)),)
	$(BIN)/pytest -m "not long" -n 3 $(BY_FILE) tests $(ALONE:%=--ignore=%)
	$(BIN)/pytest -m "not long" -n 2 $(BY_FILE) $(ALONE)
else
	$(BIN)/pytest -m "not long" $(ARGS)
endif

test-long: install packages ## Run the tests at full size
	$(BIN)/pytest -m long $(ARGS)

check: install ## Lint, formatting, types, and who may import whom
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy contracts shared services tests examples
	$(BIN)/lint-imports

bench: install packages ## Measure the workloads at small size (ARGS="--full" for full size)
	$(BIN)/python tests/bench/run.py $(ARGS)

schemas: install ## Generate contracts/schemas/ anew
	$(BIN)/python -m rowmill_contracts.schemas
	$(BIN)/python -m rowmill_admission.public > contracts/schemas/asyncapi.json

lock: install ## Resolve requirements.lock anew, with hashes and without index addresses
	$(BIN)/uv pip compile --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-emit-find-links \
	  --no-annotate --no-header --group dev pyproject.toml -o requirements.lock

clean: ## Remove caches and built files; .venv and the servers' data stay
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find contracts shared services tests examples -name __pycache__ -type d -prune -exec rm -rf {} +

packages: install # what the tests' own servers need, and a client of strangers to speak to them
	@$(BIN)/python -m rowmill.dev amqp-publish=amqp-tools

$(INSTALLED): requirements.lock pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install -q --require-hashes -r requirements.lock
	$(BIN)/python -m pip install -q --no-deps --no-build-isolation -e .
	@touch $@

$(BIN)/python:
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  if [ "$$(id -u)" = 0 ]; then become=; \
	  elif sudo -n true 2>/dev/null; then become="sudo -n"; \
	  else echo "python3-venv must be installed, and we may not; run: sudo apt-get install -y python3-venv" >&2; exit 2; fi; \
	  $$become apt-get -q update && $$become env DEBIAN_FRONTEND=noninteractive apt-get -q install -y python3-venv; }
	$(PYTHON) -m venv .venv
