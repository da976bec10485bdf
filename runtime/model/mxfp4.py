"""Keeps the experts of gpt-oss in the MXFP4 blocks of their checkpoint, which transformers expands on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch

from hdtool.runtime.kernels.compact_weight import CompactWeight
from hdtool.runtime.kernels.packed.experts_matrix import PackedExperts
from hdtool.runtime.kernels.packed.formats import ALL_FORMATS
from hdtool.runtime.kernels.packed.matrix import PackedMatrix
from hdtool.runtime.kernels.small_batch_gemm import COLUMN_MULTIPLE

MXFP4 = "mxfp4"
"""The name of the scheme in configurations."""
FORMAT = next(one for one in ALL_FORMATS if one.name == "MXFP4")
EXPANDING = "transformers.integrations.mxfp4", "Mxfp4Dequantize"
"""What expands blocks. Without it, as in a later version, weights are expanded."""


@contextmanager
def keeping_mxfp4() -> Iterator[None]:
    """Have transformers load experts in float32 as blocks meanwhile."""
    try:
        expanding = getattr(import_module(EXPANDING[0]), EXPANDING[1])
        usual = expanding.convert
    except (ImportError, AttributeError):
        yield
        return

    def convert(
        self: Any, input_dict: Any, model: Any = None, full_layer_name: str = "", *args: Any, **options: Any
    ) -> Any:
        kept = _kept(input_dict, model, full_layer_name)
        if kept is None:
            return usual(self, input_dict, model, full_layer_name, *args, **options)
        return {full_layer_name: kept}

    with patch.object(expanding, "convert", convert):
        yield


def _kept(given: Any, model: Any, name: str) -> CompactWeight | None:
    path, _, last = name.rpartition(".")
    found = [given.get(f"{last}_{part}") for part in ("blocks", "scales")]
    blocks, scales = (one[0] if isinstance(one, list) else one for one in found)
    if not isinstance(blocks, torch.Tensor) or not isinstance(scales, torch.Tensor) or model is None:
        return None
    parameter = getattr(model.get_submodule(path), last, None)
    if parameter is None or parameter.dtype != torch.float32:
        return None
    stored = packed_mxfp4(blocks, scales)
    fits = stored is not None and stored.shape == parameter.shape
    return CompactWeight(stored) if stored is not None and fits else None


def packed_mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> PackedExperts | None:
    """Experts of blocks ``[experts, rows, blocks, bytes]`` with the exponent of each; None for other forms.

    A byte has two numbers that follow each other there, and in our format two that are half a block apart.
    """
    size, half = FORMAT.bytes - 1, FORMAT.numbers // 2
    is_known = blocks.dtype == scales.dtype == torch.uint8 and blocks.dim() == 4 and blocks.shape[:3] == scales.shape
    if not is_known or blocks.shape[3] != size or blocks.shape[2] * FORMAT.numbers % COLUMN_MULTIPLE:
        return None
    number, rows, count, _ = blocks.shape
    made = torch.empty(number, rows, count, FORMAT.bytes, dtype=torch.uint8)
    for expert in range(number):  # so that little memory is needed beside it
        levels = torch.stack((blocks[expert] & 15, blocks[expert] >> 4), -1).flatten(-2)
        made[expert, ..., 0] = scales[expert]
        made[expert, ..., 1:] = levels[..., :half] | levels[..., half:] << 4
    return PackedExperts([PackedMatrix(made.view(number * rows, -1), FORMAT)], number, is_transposed=True)
