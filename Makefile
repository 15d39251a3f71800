# make serve            install, fetch the default model, serve it on http://127.0.0.1:8000
# make serve MODEL=org/name ARGS="--port 9000"
# make test             all tests;  make check: format, lint, types, imports and the fast tests
# make clients          install LangChain's client and OpenAI's for Node, and test the server with every client
# make api-docs         write docs/api.md anew from the tables of fields
# make bench            measure the engine on this machine, without a server
# make test COVERAGE=   without coverage, which slows the pure-Python tests down
# TORCH_INDEX=URL       an extra package index for torch, for example one with CPU builds only

PYTHON ?= python3
VENV ?= .venv
MODEL ?= smollm2-135m
ARGS ?=
TORCH_INDEX ?=
WORKERS ?= 2
COVERAGE ?= --cov --cov-report=term

BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
	$(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))

.PHONY: install install-dev serve test check clients format api-docs bench clean

install: $(VENV)/.installed
install-dev: $(VENV)/.installed-dev

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "tokenmill needs Python 3.11 or newer: set PYTHON")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP_INSTALL) pip
	$(PIP_INSTALL) -e .
	touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP_INSTALL) pip
	$(PIP_INSTALL) -e '.[dev]'
	touch $@ $(VENV)/.installed

serve: install
	$(BIN)/tokenmill pull $(MODEL)
	exec $(BIN)/tokenmill serve $(MODEL) $(ARGS)

test: install-dev
	$(BIN)/tokenmill pull smollm2-135m
	$(BIN)/pytest -n $(WORKERS) --dist worksteal $(COVERAGE) $(ARGS)

check: install-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/pytest -n $(WORKERS) --dist worksteal -m 'not slow and not server' $(ARGS)

format: install-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clients: install-dev
	$(PIP_INSTALL) -e '.[clients]'
	npm install --prefix tests/e2e/node --no-package-lock --no-audit --no-fund
	$(BIN)/pytest tests/e2e/test_*client*.py tests/e2e/test_structured.py tests/e2e/test_logprobs.py $(ARGS)

api-docs: install
	$(BIN)/python -m tokenmill.server.reference > docs/api.md

bench: install
	$(BIN)/tokenmill pull $(MODEL)
	$(BIN)/tokenmill bench offline --model $(MODEL) $(ARGS)

clean:
	rm -rf $(VENV) build dist .coverage* .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache tests/e2e/node/node_modules
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
