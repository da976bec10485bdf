"""Which tensors of a GGUF file stay in the blocks in which they are stored, and which are expanded, and why."""

from __future__ import annotations

from collections import Counter
from math import prod

from hdtool.runtime.kernels.matrix_formats import FORMATS_BY_NAME
from hdtool.runtime.kernels.vector_code import EXPANDS_FLOAT16
from hdtool.runtime.weights.gguf_file import UNQUANTIZED_DTYPES, GGUFFile
from hdtool.runtime.weights.stored_pieces import Piece
from hdtool.runtime.weights.weight_store import are_read_by_matmul


def stays_packed(tensor: Piece) -> bool:
    """Return True if the compiled matmul reads a tensor's blocks."""
    is_matrix = 2 <= len(tensor.shape) <= 3 and prod(tensor.shape) > 0
    return is_matrix and are_read_by_matmul(tensor.format, tensor.columns)


def slow_weights(file: GGUFFile) -> str | None:
    """Describe how many quantized matrices must be expanded to float32 and why; return None if there are none."""
    matrices = [tensor for tensor in file.tensors.values() if len(tensor.shape) > 1]
    slow = [matrix for matrix in matrices if matrix.format not in UNQUANTIZED_DTYPES and not stays_packed(matrix)]
    if not slow:
        return None
    reasons = ", ".join(f"{count} in {reason}" for reason, count in Counter(map(_reason, slow)).most_common())
    return f"{len(slow)} of {len(matrices)} weights are computed in float32, slower and larger ({reasons})"


def _reason(tensor: Piece) -> str:
    if tensor.format not in FORMATS_BY_NAME:
        return tensor.format
    if not EXPANDS_FLOAT16:
        return f"{tensor.format} on a processor that cannot convert float16"
    return f"{tensor.format} with {tensor.columns} columns"
