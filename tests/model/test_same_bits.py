"""Processes on one machine compute the same bits, whatever lies in hdtool's home."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hdtool.data.durable_files import json_digest

ANSWER = """
import hashlib
import torch
from hdtool.runtime.budget.measure_passes import quick_record
from hdtool.runtime.settings.decoding import DecodeConfig
from hdtool.runtime.settings.model import ModelConfig, SamplingConfig
from hdtool.runtime.drafters.drafter_factory import drafter_for
from hdtool.runtime.engines.proofs.probes import some_context
from hdtool.runtime.target.cpu_threads import choose_threads
from hdtool.runtime.target.load import load
from hdtool.runtime.core.session import decode
from hdtool.runtime.stores.store_set import StoreSet
from tests.support.samplers import sampler_of

for is_compiled in (True, False):
    torch.set_num_threads(4)
    target = load(ModelConfig(fused_layers=is_compiled)).target
    assert (target.compiled is not None) == is_compiled
    threads = choose_threads(target, record=quick_record(target, what="threads"))
    prompt = some_context(150, target.vocabulary)
    sampler = sampler_of(SamplingConfig(temperature=0.8, seed=5), prompt)
    drafter = drafter_for(DecodeConfig("hd"), target, StoreSet())
    for _ in decode(target, prompt, sampler, max_new_tokens=40, drafter=drafter):
        pass
    digest = hashlib.sha256(str(sampler.context).encode())
    digest.update(target.prefill(target.allocate(), 0, sampler.context).logits.numpy().tobytes())
    print(threads, digest.hexdigest())
"""


@pytest.mark.long
def test_a_seed_gives_the_same_bits_with_an_empty_home_and_after_other_measurements(tmp_path: Path) -> None:
    """Neither compiled passes nor those of transformers depend on what was measured earlier."""
    (threads, bits), by_library = answered(tmp_path)
    others = 1 if threads > 1 else 2
    for record in (tmp_path / "costs" / "quick").glob("*.json"):  # as if another number of threads had been faster
        row = json.loads(record.read_text())
        if isinstance(row["value"], int):
            row["value"], row["sha256"] = others, json_digest(others)
            record.write_text(json.dumps(row))
    assert answered(tmp_path) == [(others, bits), by_library]


def answered(home: Path) -> list[tuple[int, str]]:
    """The number of threads, and a hash of an answer and of the logits after it, by each code."""
    environment = {**os.environ, "HDTOOL_HOME": str(home)}
    ran = subprocess.run([sys.executable, "-c", ANSWER], capture_output=True, text=True, check=True, env=environment)
    lines = [line.split() for line in ran.stdout.splitlines()[-2:]]
    return [(int(threads), bits) for threads, bits in lines]
