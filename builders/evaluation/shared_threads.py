"""Sets one number of threads for all contenders of a comparison, so that no peer is slowed down."""

from __future__ import annotations

import time
from typing import Any

import torch
from transformers import PreTrainedModel

from hdtool.runtime.engines.proofs.probes import some_context
from hdtool.runtime.target.cpu_threads import NODES, choose_threads, cpu_quota, fastest_threads, mean_seconds
from hdtool.runtime.target.target import Target


def choose_shared_threads(target: Target, peer: PreTrainedModel | None, wanted: int | None = None) -> int:
    """Set the number of threads of all contenders, and return it: ``wanted`` or, if None, the one that suits the peer.

    ``peer`` is the model on which transformers' ``generate`` runs; the number that suits it makes its forward passes
    fastest. Without a peer on the CPU, the number is the one that hdtool chooses for itself.
    """
    if wanted is not None or peer is None or peer.device.type != "cpu":
        return choose_threads(target, wanted)
    most = torch.get_num_threads()
    torch.set_num_threads(fastest_threads(lambda count: _pass_seconds(peer, count), min(most, cpu_quota() or most)))
    return torch.get_num_threads()


@torch.no_grad()
def _pass_seconds(model: Any, threads: int) -> float:
    """Return the total seconds of a pass of each size in ``NODES``, the sizes that hdtool times for itself."""
    torch.set_num_threads(threads)
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    inputs = [torch.tensor([some_context(1 + nodes, vocabulary)]) for nodes in NODES]

    def run() -> float:
        began = time.perf_counter()
        for ids in inputs:
            model(ids)
        return time.perf_counter() - began

    return mean_seconds(run)
