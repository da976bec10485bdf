# Two commands: `make demo` shows hdtool at work, `make test` checks all of it.
# Each sets up .venv on its first run and again only when the pins change.

PYTHON ?= python3
BIN := .venv/bin
PINS := pyproject.toml constraints.txt

.PHONY: demo test test-ray format types unit docs bench clean

demo: .venv/installed .compiled
	$(BIN)/hdtool demo

test: .venv/installed-dev .compiled
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(MAKE) --no-print-directory types
	$(BIN)/python -m tests.command_reference --check
	$(BIN)/pytest -n auto --dist loadfile

# Ray brings libraries of its own, so its tests have an environment of their own.
test-ray: .venv-ray/installed
	.venv-ray/bin/pytest tests/test_ray.py

format: .venv/installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# mypy cannot follow an editable install of mapped folders, so it reads them through a tree of links.
types: .venv/installed-dev
	@mkdir -p .types/hdtool
	@for room in builders cli data runtime; do ln -sfn ../../$$room .types/hdtool/$$room; done
	$(BIN)/mypy -p hdtool
	$(BIN)/mypy tests

docs: .venv/installed-dev
	$(BIN)/python -m tests.command_reference

bench: .venv/installed-dev
	$(BIN)/python -m tests.benchmarks.plain_decoding

# numba keeps compiled functions beside their files and does not see when what they call has changed elsewhere.
.compiled: $(wildcard builders/*.py runtime/*.py runtime/*/*.py)
	@find builders runtime -name '*.nb[ic]' -delete
	@touch $@

clean:
	rm -rf .venv .venv-ray .types .compiled build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis

.venv/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "error: hdtool needs Python 3.11 or newer; name one: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv .venv
	@touch $@

.venv/installed: .venv/python $(PINS)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	@touch $@

.venv/installed-dev: .venv/python $(PINS)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $@ .venv/installed

.venv-ray/installed: .venv/python $(PINS)
	$(PYTHON) -m venv .venv-ray
	.venv-ray/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev,ray]"
	@touch $@
