"""Decides which weights and modules the pass of a described model supports."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import Embedding, Module, Parameter

from hdtool.runtime.program.hybrid_families import DESCRIBED
from hdtool.runtime.program.model_parts import EngineSupport


def program_support(dtype: torch.dtype, device: torch.device) -> EngineSupport[Module]:
    """Return which modules and families the reference pass supports, for weights of ``dtype`` on ``device``."""

    def is_dense(weight: torch.Tensor) -> bool:
        return weight.is_contiguous() and weight.device == device

    def is_plain(weight: Any) -> bool:
        return type(weight) is Parameter and weight.dtype == dtype and is_dense(weight)

    def is_mixer_weight(weight: Any) -> bool:
        """Return True for a contiguous parameter or buffer on ``device`` that has ``dtype`` or float32."""
        return type(weight) in (Parameter, torch.Tensor) and weight.dtype in (dtype, torch.float32) and is_dense(weight)

    def is_embedding(module: Module) -> bool:
        return isinstance(module, Embedding) and module.max_norm is None and is_plain(module.weight)

    return EngineSupport(_has_shape, is_plain, is_embedding, families=DESCRIBED, is_mixer_weight=is_mixer_weight)


def _has_shape(module: Any) -> bool:
    return all(isinstance(getattr(module, name, None), int) for name in ("in_features", "out_features"))
