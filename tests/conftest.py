"""Shared set-up: quiet libraries, one thread a worker, no network, a home of the tests' own."""

import os
from importlib.util import find_spec
from tempfile import TemporaryDirectory

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import hypothesis
import pytest
import torch
from transformers.utils import logging

HOME = TemporaryDirectory(prefix="hdtool-tests-")  # what is measured in tests is not kept for the user
os.environ["HDTOOL_HOME"] = HOME.name

collect_ignore = [] if find_spec("vllm") else ["vllm"]

# Workers of pytest-xdist share the cores; two busy threads each would only wait for one another.
torch.set_num_threads(1)
logging.set_verbosity_error()
logging.disable_progress_bar()

hypothesis.settings.register_profile("hdtool", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("hdtool")

FAMILIES = {"llama", "gemma2", "gpt2", "qwen3_moe", "llama4", "mistral"}
"""Full, sliding and chunked attention, learned positions, mixtures of experts; the others are tested by test-long."""


@pytest.hookimpl(tryfirst=True)  # before tests are deselected by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            family = item.callspec.params.get("family")
            if isinstance(family, str) and family not in FAMILIES:
                item.add_marker(pytest.mark.long)
