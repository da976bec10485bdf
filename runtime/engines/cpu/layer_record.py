"""What compiled code reads of a pass and of each layer: arrays of integers, most of them addresses.

A family of models is a description: a layer lacks what has address 0. Floats are there by their bits.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hdtool.runtime.kernels.compiled import WORD_SIZE, array_at, compiled, float_of
from hdtool.runtime.kernels.gemm import call_at
from hdtool.runtime.kernels.thread_pool import MIN_PARALLEL_WEIGHTS, parallel_matmul, run_parallel
from hdtool.runtime.kernels.vector_code import ITEM_SIZE, add_in_place, norm_rows, scale_in_place

TO_QUERIES, TO_KEYS, TO_VALUES, TO_OUTPUT, TO_GATE, TO_UP, TO_DOWN = range(7)
"""The matmuls of a layer."""
MATMUL_FIELDS = 5
"""Addresses of the compiled matmul and of the matrix, rows and columns of it, address of the bias."""
NORM_BEFORE, NORM_MIXED, NORM_MIDDLE, NORM_END, NORM_Q, NORM_K, SINKS, KEYS, VALUES, WINDOW, ROTARY = range(
    7 * MATMUL_FIELDS, 7 * MATMUL_FIELDS + 11
)
EXPERTS, ROUTER = range(ROTARY + 1, ROTARY + 3)
"""Addresses of the weights of norms: before attention, of its output, before the MLP, of its output, of queries and of
keys; of the sinks of attention, and of the keys and values that the layer reads, which it writes if it has a matmul for
keys. Then the positions that a row sees, 0 for all; and the number of the kind of rotary positions, -1 for none.
Addresses of the records of experts and of what chooses them; the matmuls of the MLP are those of an expert that all
rows have then, if there is one."""
HEADS, GROUPS, WIDTH, TURNED, SLOT_STRIDE, HEAD_STRIDE, NORM_V = range(ROUTER + 1, ROUTER + 8)
"""Heads of keys, query heads for each of them, the numbers of a head, and those that are rotated; numbers from the keys
of one sequence or head to the next; and the address of the weight of the norm of values, which are the keys before
their norm where the layer has no matmul for values."""
INPUT_GATE = NORM_V + 1
INPUT_OUT = INPUT_GATE + MATMUL_FIELDS
INPUT_AT, NORM_INPUT, FACTOR, BESIDE = range(INPUT_OUT + MATMUL_FIELDS, INPUT_OUT + MATMUL_FIELDS + 4)
"""What a layer adds after the MLP, of an input that it alone has: the matmuls before and after the gate, where the
input begins among those of all layers, and the address of the norm's weight. Then that of the factor of the output, and
that of the record of a mixture of experts beside the MLP."""
MIXER = BESIDE + 1
"""What mixes the tokens of the layer: attention, or a recurrence or short convolution by its number."""
ATTENTION, SHORT_CONVOLUTION, DELTA_RULE, MAMBA2 = range(4)
TAPS, COLUMNS, CHANNELS, CONV_WEIGHT, CONV_BIAS, CONV_STATE, CONV_STRIDE = range(MIXER + 1, MIXER + 8)
"""What describes a short convolution: its taps, the columns of its state, and its channels; addresses of the weight
``[taps, channels]``, the bias and the state ``[channels, columns]``; numbers from one state to the next sequence's."""
STATE, STATE_STRIDE, KEY_HEADS, STATE_HEADS, KEY_WIDTH, VALUE_WIDTH = range(MIXER + 8, MIXER + 14)
"""What describes a recurrence: the address of its state, and numbers from one sequence's to the next; heads of keys,
heads of states, and the numbers of a key and of a value."""
DECAY_LOG, STEP_BIAS, SKIP, GATE_NORM, GATE_EPSILON = range(MIXER + 14, MIXER + 19)
"""Addresses of the logarithm of each head's decay rate, of the bias of its time step, of its factor of what skips the
state, and of the weight of the gated norm, with the bits of the epsilon of that."""
JOURNAL_AT, STRENGTH, FOURTH = range(MIXER + 19, MIXER + 22)
"""Numbers that earlier layers keep of a row; the bits of the factor of how much a row teaches; and the matmul of a
mixer's fourth input, which those of the fifth and the sixth one follow. Where these are, the first input, they two give
queries, keys and values one after another. A delta rule without a fourth input has all in two, by heads of keys."""
FIFTH, SIXTH = FOURTH + MATMUL_FIELDS, FOURTH + 2 * MATMUL_FIELDS
OUTPUTS = SIXTH + MATMUL_FIELDS
"""The address that the output of the layer is copied to, 0 if nothing reads it."""
FIELDS = OUTPUTS + 1

SLOTS, NEW, HIDDEN, INNER = range(4)
"""The fields of a pass begin here: sequences and the most new rows of one, which is that of each where layers have
mixers; then shapes, and ``INNER`` is that of the widest MLP."""
PLACES, ROTATED, ROTARY_WIDTH, PAIRED = range(4, 8)
"""Addresses of the positions of rows, and of their cosines and sines, one kind after another; the numbers of a row of
these, of which a layer may read fewer, and whether pairs are side by side."""
INPUTS, INPUTS_STRIDE = range(8, 10)
"""The address of the inputs that layers have beside hidden states, and numbers from one row of them to the next."""
MASK, MASK_SLOT, MASK_ROW, TEAM, THREADS, PART = range(10, 16)
"""The address of the mask, and numbers from one sequence or row of it to the next; the open team of threads, 0 for
none, and their number; the address of ``part_function``."""
SCALE, SOFTCAP, EPSILON, OFFSET, RESIDUAL, NORMS_ALL, TANH_GATE, OF_EXPERTS = range(16, 24)
"""The factor of scores, and what bounds them; of norms, the epsilon and what is added to weights; the factor of what is
added to hidden states; whether queries, and keys, are normed as a whole; whether the MLP has a GELU; the numbers of
scratch memory that experts need for a row."""
GATES_HEADS, MIXER_PART, ORIGINS, JOURNAL, ADVANCES, MIXER_ROW, MIXER_STATE, MIXER_WINDOW = range(24, 32)
"""Whether queries have gates beside them, for what attention gives; of mixers, the address of ``mixer_function``, of
where each row starts and of what is kept of rows; whether states become those after the last row; and the numbers of
scratch memory for a row, for a state, and for the columns of a sequence."""
TOTAL_ROWS, ROW_OFFSETS = range(MIXER_WINDOW + 1, MIXER_WINDOW + 3)
"""The rows of all sequences, one sequence after another; and the address of where those of each begin, and end."""
PASS_FIELDS = ROW_OFFSETS + 1

Numbers = npt.NDArray[np.int64]


@compiled
def multiply(shape: Numbers, layer: Numbers, which: int, inputs: int, rows: int, outputs: int) -> None:
    multiply_by(shape, layer, which * MATMUL_FIELDS, inputs, rows, outputs)


@compiled
def multiply_by(shape: Numbers, layer: Numbers, field: int, inputs: int, rows: int, outputs: int) -> None:
    """Multiply by the matrix whose fields begin there."""
    matmul, matrix, out_features, columns, bias = layer[field : field + MATMUL_FIELDS]
    parallel_matmul(shape[TEAM], shape[THREADS], matmul, matrix, out_features, columns, inputs, rows, outputs, bias)


@compiled
def compute_part(
    shape: Numbers,
    function: int,
    layer: Numbers,
    starts: Numbers,
    part: int,
    one: int,
    two: int,
    three: int,
    units: int,
    work: int,
) -> None:
    """Compute a part between matmuls, with the other threads if there is enough work."""
    team = shape[TEAM] if work >= MIN_PARALLEL_WEIGHTS else 0
    of_layer = shape.ctypes.data, layer.ctypes.data, starts.ctypes.data
    run_parallel(team, shape[THREADS], function, *of_layer, part, one, two, three, units, 1)


EMBED, EMBEDDING, MULTIPLIER, PROJECT, PROJECTION, OUT_FEATURES, EMBED_SCALE, NORM, EMBED_WIDTH, SHARE = range(10)
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
    stride, width = record[OUT_FEATURES], record[EMBED_WIDTH]
    matmul, matrix = record[PROJECT], record[PROJECTION]
    parallel_matmul(shape[TEAM], shape[THREADS], matmul, matrix, stride, shape[HIDDEN], embedded, rows, written, 0)
    scale_in_place(written, rows * stride, float_of(record, EMBED_SCALE))
    epsilon, offset = float_of(shape, EPSILON), float_of(shape, OFFSET)
    norm_rows(written, rows * stride // width, width, record[NORM], offset, epsilon, written)
    of_token = written + rows * stride * ITEM_SIZE
    for row in range(rows):
        call_at(record[EMBED], record[EMBEDDING], stride, of_ids + row * WORD_SIZE, 1, of_token, 0, 0, 0, 0)
        scale_in_place(of_token, stride, float_of(record, MULTIPLIER))
        add_in_place(written + row * stride * ITEM_SIZE, of_token, stride, np.float32(1))
    scale_in_place(written, rows * stride, float_of(record, SHARE))
