"""Bare loops of vector products, whose speed no matmul on this processor exceeds without AMX."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import numpy as np
from numba import types

from hdtool.runtime.kernels.compiled import BYTES, compiled, generated
from hdtool.runtime.kernels.int8_dot_products import (
    DOT_OF_OCTETS,
    DOT_OF_SIGNED,
    OCTETS,
    PLANE,
    WORDS,
    IntegerCode,
    best_dot,
)
from hdtool.runtime.kernels.vector_code import LANES, VECTOR, VectorCode

SUMS = 12
"""Number of independent sums of a loop.

An instruction waits for the previous one on the same sum, and with fewer sums, the loop would measure that latency.
"""
ROUNDS = 1_000_000


def _loop(code: VectorCode, count: Any, address: Any, kind: Any, product: Callable[[Any, Any, Any], Any]) -> None:
    """Generate a loop that adds the product of two loaded vectors to each sum, and code that stores the total."""
    pointer = code.builder.inttoptr(address, BYTES)
    first, second, *sums = [code.load(code.gep(pointer, place * PLANE), kind) for place in range(2 + SUMS)]

    def multiply(_: Any, sums: list[Any]) -> Sequence[Any]:
        return [product(first, second, added) for added in sums]

    sums = code.loop(count, sums, multiply, 1)
    add = code.builder.fadd if kind == VECTOR else code.builder.add
    code.builder.store(reduce(add, sums), code.builder.bitcast(pointer, kind.as_pointer())).align = 1


@generated(types.int64, types.int64)
def _add_floats(builder: Any, count: Any, address: Any) -> None:
    code = VectorCode(builder)
    _loop(code, count, address, VECTOR, code.multiply_add)


@generated(types.int64, types.int64)
def _add_octets(builder: Any, count: Any, address: Any) -> None:
    code = IntegerCode(builder, best_dot())

    def product(levels: Any, inputs: Any, added: Any) -> Any:
        if code.dot == DOT_OF_OCTETS:
            return code.call(f"llvm.x86.avx512.vpdpbusd.{8 * PLANE}", WORDS, added, levels, inputs)
        return code.added_products(builder.bitcast(levels, OCTETS), builder.bitcast(inputs, OCTETS), added)

    _loop(code, count, address, WORDS, product)


@compiled
def _multiply_floats(rounds: int, address: int) -> None:
    _add_floats(rounds, address)


@compiled
def _multiply_octets(rounds: int, address: int) -> None:
    _add_octets(rounds, address)


LOOPS = {"float32": (_multiply_floats, SUMS * LANES)}
"""By data type: a loop, and the products of one round."""
if best_dot() in (DOT_OF_OCTETS, DOT_OF_SIGNED):  # others need several instructions
    LOOPS["int8"] = _multiply_octets, SUMS * PLANE


class VectorProducts:
    """Runs the loop of ``LOOPS`` for a data type."""

    def __init__(self, data_type: str) -> None:
        self._loop, products = LOOPS[data_type]
        self._numbers = np.zeros((2 + SUMS) * PLANE, np.uint8)
        self._loop(0, self._numbers.ctypes.data)  # compiles it
        self.products = products * ROUNDS
        """Number of products of a run."""

    def run(self) -> None:
        self._loop(ROUNDS, self._numbers.ctypes.data)
