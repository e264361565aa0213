PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: setup demo test soak clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@# For the tests of the web page; without it they are skipped, and say so.
	command -v chromium >/dev/null || ! command -v apt-get >/dev/null || { apt-get update -qq && \
	  DEBIAN_FRONTEND=noninteractive apt-get install -qq -y chromium >/dev/null; } || echo "no Chromium: browser tests are skipped"
	touch $@

demo: setup
	$(BIN)/esper grow --task digits --controller heuristic --out runs/demo --overwrite

test: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/pytest --numprocesses 2 -m 'not soak'

soak: setup
	$(BIN)/pytest --numprocesses 2 -m soak

clean:
	rm -rf .venv
