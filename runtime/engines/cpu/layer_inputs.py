"""Inputs that layers have beside hidden states, made of the token ids and the embeddings at the start of a pass."""

from __future__ import annotations

import numpy as np

from hdtool.runtime.engines.cpu.layer_record import EPSILON, HIDDEN, OFFSET, TEAM, THREADS, Numbers
from hdtool.runtime.kernels.compiled import compiled
from hdtool.runtime.kernels.elementwise import add_in_place, norm_rows, scale_in_place
from hdtool.runtime.kernels.matmul_address import call_at
from hdtool.runtime.kernels.memory.raw_memory import WORD_SIZE, array_at, float_of
from hdtool.runtime.kernels.team import multiply_together
from hdtool.runtime.kernels.vector_code import ITEM_SIZE

EMBED, EMBEDDING, MULTIPLIER, PROJECT, PROJECTION, OUT_FEATURES, SCALE, NORM, WIDTH, SHARE = range(10)
"""Addresses of ``embedding_of`` a format and of the matrix that has a row for each token, with the bits of its factor;
of the matmul and the matrix that project embeddings, with the numbers of a row of all layers and the bits of what they
are multiplied by; and of the weight of their norm, which is over the numbers of one layer. Then these, and the bits of
the factor of both together."""
INPUT_FIELDS = SHARE + 1


@compiled
def layer_input_numbers(stride: int, rows: int) -> int:
    """The float32 numbers that ``compute_layer_inputs`` needs: all inputs, and a row more."""
    return (rows + 1) * stride


@compiled
def compute_layer_inputs(shape: Numbers, at: int, of_ids: int, rows: int, embedded: int, written: int) -> None:
    """Write the inputs of all layers, row by row, by the record at an address."""
    record = array_at(at, (INPUT_FIELDS,), np.int64)
    stride, width = record[OUT_FEATURES], record[WIDTH]
    matmul, matrix = record[PROJECT], record[PROJECTION]
    multiply_together(shape[TEAM], shape[THREADS], matmul, matrix, stride, shape[HIDDEN], embedded, rows, written, 0)
    scale_in_place(written, rows * stride, float_of(record, SCALE))
    epsilon, offset = float_of(shape, EPSILON), float_of(shape, OFFSET)
    norm_rows(written, rows * stride // width, width, record[NORM], offset, epsilon, written)
    of_token = written + rows * stride * ITEM_SIZE
    for row in range(rows):
        call_at(record[EMBED], record[EMBEDDING], stride, of_ids + row * WORD_SIZE, 1, of_token, 0, 0, 0, 0)
        scale_in_place(of_token, stride, float_of(record, MULTIPLIER))
        add_in_place(written + row * stride * ITEM_SIZE, of_token, stride, np.float32(1))
    scale_in_place(written, rows * stride, float_of(record, SHARE))
