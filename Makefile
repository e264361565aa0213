PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
# Ninja, which compiles the simulated accelerator, is in the virtual environment.
export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: setup browser device demo docs check test quick soak clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

# For the tests of the web page; without it they are skipped, and say so.
browser:
	command -v chromium >/dev/null || ! command -v apt-get >/dev/null || { apt-get update -qq && \
	  DEBIAN_FRONTEND=noninteractive apt-get install -qq -y chromium >/dev/null; } || echo "no Chromium: browser tests are skipped"

# The simulated accelerator, compiled once; without a compiler its tests are skipped, and say so.
device: setup
	command -v c++ >/dev/null && $(BIN)/python tests/pretend_device/pretend_device.py \
	  || echo "no C++ compiler: tests on the simulated device are skipped"

demo: setup
	$(BIN)/esper grow --task digits --controller heuristic --key 2 --out runs/demo --overwrite

# A site for the browser, in the folder `site`; a dead link or anchor is an error.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo site/index.html

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: check browser device
	$(BIN)/pytest --numprocesses 2 --dist loadfile -m 'not soak'

# For everyday work: without a browser and without other people's frameworks.
quick: check device
	$(BIN)/pytest --numprocesses 2 --dist loadfile -m 'not soak and not heavy'

soak: setup browser
	$(BIN)/pytest --numprocesses 2 --dist loadfile -m soak

clean:
	rm -rf .venv site
