"""Compile what drafters and models compile when they are made, so that test workers load it and do not all wait for it.

python -m tests.compile_kernels drafters    # or layers or matmuls
"""

from __future__ import annotations

import sys

from hdtool.data import demo
from hdtool.runtime.budget.node_budget import FixedBudget
from hdtool.runtime.drafters.drafter_factory import drafter_with_budget
from hdtool.runtime.engines.cpu.layer_experts import expert_function
from hdtool.runtime.engines.cpu.layer_kernel import compile_layers
from hdtool.runtime.engines.cpu.mixer_kernel import mixer_function
from hdtool.runtime.engines.cpu.pass_kernel import compile_passes, embedding_of
from hdtool.runtime.integrations.vllm.batch_drafter import BatchDrafter
from hdtool.runtime.kernels.code_folder import mark_compiled
from hdtool.runtime.kernels.compile_process import PASSES
from hdtool.runtime.kernels.int8_matmul import int8_matmul_of
from hdtool.runtime.kernels.matmul import matmul_of
from hdtool.runtime.kernels.matrix_formats import ALL_FORMATS, FORMATS
from hdtool.runtime.settings.decoding import METHODS, TRAINED, DecodeConfig
from hdtool.runtime.settings.serving import VllmConfig
from hdtool.runtime.stores.corpus_index import CorpusIndex
from hdtool.runtime.stores.history_store import History
from hdtool.runtime.stores.model_store import ModelStore
from hdtool.runtime.stores.store_set import StoreSet


def compile_drafters() -> None:
    stores = StoreSet(ModelStore(demo.MODEL_STORE), CorpusIndex(demo.CORPUS_INDEX), history=History())
    for method in METHODS:
        if method not in TRAINED:
            drafter_with_budget(FixedBudget, DecodeConfig(method), stores)
    BatchDrafter(stores, VllmConfig(), rows=2, max_length=64)


def compile_all_layers() -> None:
    compile_layers()
    compile_passes()
    expert_function()
    mixer_function()
    mark_compiled(PASSES)


def compile_matmuls() -> None:
    for format in FORMATS.values():
        matmul_of(format)
        embedding_of(format)
    for format in ALL_FORMATS:
        int8_matmul_of(format)


PARTS = {"drafters": compile_drafters, "layers": compile_all_layers, "matmuls": compile_matmuls}

if __name__ == "__main__":
    PARTS[sys.argv[1]]()
