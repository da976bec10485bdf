"""Computes the fingerprint of a loaded model from samples of its weights."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import torch

from hdtool.runtime.kernels.compact_weight import is_compact
from hdtool.runtime.model.quantization import parts_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SAMPLED_WEIGHTS = 16
"""Maximum number of values per parameter, or per part of a quantized one, that a model's fingerprint hashes."""


@torch.no_grad()
def fingerprint(model: PreTrainedModel) -> str:
    """Return a hash of the model's class and of each parameter's name, shape and first few values."""
    digest = hashlib.sha256(type(model).__name__.encode())
    for name, weight in model.named_parameters():
        # Rounded to bfloat16, so that the fingerprint does not depend on the dtype that a checkpoint is loaded in.
        parts = [weight.stored[:1].float()] if is_compact(weight) and weight.dim() > 1 else parts_of(weight)
        samples = [part[(0,) * (part.dim() - 1)].reshape(-1)[:SAMPLED_WEIGHTS].to(torch.bfloat16) for part in parts]
        digest.update(f"{name} {tuple(weight.shape)} {', '.join(str(corner.tolist()) for corner in samples)}".encode())
    return digest.hexdigest()[:16]
