"""Shared set-up: quiet libraries, one thread a worker, no network."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import hypothesis
import torch
from transformers.utils import logging

# Workers of pytest-xdist share the cores; two busy threads each would only wait for one another.
torch.set_num_threads(1)
logging.set_verbosity_error()
logging.disable_progress_bar()

hypothesis.settings.register_profile("hdtool", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("hdtool")
