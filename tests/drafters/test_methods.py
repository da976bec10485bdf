"""The methods by their names: drafters that are ready when they are made."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.methods import METHODS_WITHOUT_DRAFT_MODEL

LATE = """
import gc, sys
import torch
from numba.core.registry import CPUDispatcher
from hdtool.runtime.core.session import decode
from hdtool.data import demo
from hdtool.runtime.core.accept import Accepted
from hdtool.runtime.settings.decoding import DecodeConfig
from hdtool.runtime.settings.model import ModelConfig, SamplingConfig
from hdtool.runtime.stores.corpus_index import CorpusIndex
from hdtool.runtime.target.load import load
from hdtool.runtime.drafters.drafter_factory import drafter_for
from hdtool.runtime.core.sampler import Sampler
from hdtool.runtime.stores.model_store import ModelStore
from hdtool.runtime.stores.store_set import StoreSet
from hdtool.runtime.core.engine_interface import Verified

def ready():
    return {(f, signature) for f in gc.get_objects() if isinstance(f, CPUDispatcher) for signature in f.signatures}

target = load(ModelConfig(threads=1)).target
store_set = StoreSet(ModelStore(demo.MODEL_STORE), CorpusIndex(demo.CORPUS_INDEX))
for method in sys.argv[1:]:
    drafter = drafter_for(DecodeConfig(method, draft_tokens=40), target, store_set)
    words = [place % 7 for place in range(40)]
    target.prefill(target.cache, 0, words)
    sampler = Sampler(SamplingConfig(1.0), words)
    before = ready()
    drafter.begin(words)
    drafted = size = 0
    for turn in range(9):
        words.append(words[-7])
        hidden = torch.zeros(1 + size if turn else 40, target.config.hidden_size)
        drafter.observe(Accepted([], words[-1:]), Verified(torch.zeros(1 + size, 4096), hidden))
        tree = drafter.draft(words)
        size = len(tree)
        drafted += size
    tree.within(1, 1)
    for _ in decode(target, sampler.context, sampler, max_new_tokens=4, drafter=drafter):
        pass
    print(method, drafted > 0, [f.__name__ for f, _ in ready() - before])
"""


@pytest.mark.long
@pytest.mark.parametrize(
    "chosen",
    [
        ("hd+logitspec",),
        pytest.param(
            tuple(name for name in METHODS_WITHOUT_DRAFT_MODEL if name != "ar"),
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_no_step_waits_for_the_compiler(chosen: tuple[str, ...]) -> None:
    found = subprocess.run([sys.executable, "-c", LATE, *chosen], capture_output=True, text=True, check=True).stdout
    assert found.splitlines() == [f"{method} True []" for method in chosen]
