"""Gates beside the queries of attention, by which what it gives is multiplied."""

from __future__ import annotations

from typing import Any

from numba import types

from hdtool.runtime.kernels.compiled import compiled, generated
from hdtool.runtime.kernels.memory.raw_memory import copy_numbers
from hdtool.runtime.kernels.vector_code import ITEM_SIZE
from hdtool.runtime.kernels.vectors import FloatCode


@generated(*[types.int64] * 3)
def _multiply_by_sigmoid(builder: Any, gates: Any, numbers: Any, size: Any) -> None:
    """``numbers *= sigmoid(gates)``"""
    code = FloatCode(builder)

    def apply(index: Any, _: list[Any]) -> list[Any]:
        place = code.at(numbers, index)
        divisor = builder.fadd(code.exp(builder.fneg(code.read(code.at(gates, index)))), code.number(1.0))
        code.store(builder.fdiv(code.read(place), divisor), place)
        return []

    code.loop(size, [], apply)


@compiled
def split_gates(joined: int, queries: int, heads: int, width: int, first: int, end: int) -> None:
    """Copy the queries of some rows from beside their gates: both halves of a head are side by side."""
    size = width * ITEM_SIZE
    for head in range(first * heads, end * heads):
        copy_numbers(joined + 2 * head * size, width, queries + head * size)


@compiled
def gate_heads(joined: int, attended: int, heads: int, width: int, first: int, end: int) -> None:
    """Multiply what some rows attended to by the sigmoid of their gates."""
    size = width * ITEM_SIZE
    for head in range(first * heads, end * heads):
        _multiply_by_sigmoid(joined + (2 * head + 1) * size, attended + head * size, width)
