"""Shared set-up: quiet libraries, one thread a worker, no network, a home of the tests' own."""

import os
from importlib.util import find_spec
from tempfile import TemporaryDirectory

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import hypothesis
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
