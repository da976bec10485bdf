"""Records that compiled code reads of a pass and of each layer: int64 fields, mostly addresses.

Address 0 means that a layer lacks the part; floats are stored by their bits.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hdtool.runtime.kernels.compiled import WORD_SIZE, array_at, compiled, float_of
from hdtool.runtime.kernels.gemm import call_at
from hdtool.runtime.kernels.thread_pool import MIN_PARALLEL_WEIGHTS, parallel_matmul, run_parallel
from hdtool.runtime.kernels.vector_code import ITEM_SIZE, add_in_place, norm_rows, scale_in_place

TO_QUERIES, TO_KEYS, TO_VALUES, TO_OUTPUT, TO_GATE, TO_UP, TO_DOWN = range(7)
"""Matmuls of a layer."""
MATMUL_FIELDS = 5
"""Addresses of the matmul and the matrix, its rows and columns, and the address of the bias."""
NORM_BEFORE, NORM_MIXED, NORM_MIDDLE, NORM_END, NORM_Q, NORM_K, SINKS, KEYS, VALUES, WINDOW, ROTARY = range(
    7 * MATMUL_FIELDS, 7 * MATMUL_FIELDS + 11
)
EXPERTS, ROUTER = range(ROTARY + 1, ROTARY + 3)
"""NORM_BEFORE to NORM_K: addresses of norm weights before attention, after it, before the MLP, after it, of queries and
of keys. SINKS: address of attention sinks. KEYS, VALUES: addresses of what the layer reads, and writes if it has a
matmul for keys. WINDOW: positions a row sees, 0 for all. ROTARY: index of the rotary type, -1 for none. EXPERTS,
ROUTER: addresses of their records; the MLP's matmuls are then the shared expert's, if there is one."""
HEADS, GROUPS, WIDTH, TURNED, SLOT_STRIDE, HEAD_STRIDE, NORM_V = range(ROUTER + 1, ROUTER + 8)
"""Key heads, query heads per key head, head width and rotated width; strides between sequences and between heads;
address of the weight of the values' norm. Without a matmul for values, they are the keys before their norm."""
INPUT_GATE = NORM_V + 1
INPUT_OUT = INPUT_GATE + MATMUL_FIELDS
INPUT_AT, NORM_INPUT, FACTOR, BESIDE = range(INPUT_OUT + MATMUL_FIELDS, INPUT_OUT + MATMUL_FIELDS + 4)
"""What a layer adds after the MLP from its own input: matmuls before and after the gate, the input's offset among all
layers', the address of the norm's weight; then the addresses of the output's factor and of the record of a mixture
beside the MLP."""
MIXER = BESIDE + 1
"""What mixes tokens in the layer: attention, a recurrence or a short convolution."""
ATTENTION, SHORT_CONVOLUTION, DELTA_RULE, MAMBA2 = range(4)
TAPS, COLUMNS, CHANNELS, CONV_WEIGHT, CONV_BIAS, CONV_STATE, CONV_STRIDE = range(MIXER + 1, MIXER + 8)
"""A convolution's taps, state columns and channels; addresses of the weight ``[taps, channels]``, the bias and the
state ``[channels, columns]``; stride between the states of sequences."""
STATE, STATE_STRIDE, KEY_HEADS, STATE_HEADS, KEY_WIDTH, VALUE_WIDTH = range(MIXER + 8, MIXER + 14)
"""A recurrence's state: its address and the stride between sequences; key heads, state heads, key width and value
width."""
DECAY_LOG, STEP_BIAS, SKIP, GATE_NORM, GATE_EPSILON = range(MIXER + 14, MIXER + 19)
"""Addresses of each head's log decay rate, time-step bias and skip factor, and of the gated norm's weight; bits of that
norm's epsilon."""
JOURNAL_AT, STRENGTH, FOURTH = range(MIXER + 19, MIXER + 22)
"""JOURNAL_AT: numbers that earlier layers keep per row. STRENGTH: bits of the factor of the learning rate. FOURTH:
matmul of a mixer's fourth input; if there are a fifth and a sixth, they and the first give queries, keys and values. A
delta rule without a fourth input has two, by key heads."""
FIFTH, SIXTH = FOURTH + MATMUL_FIELDS, FOURTH + 2 * MATMUL_FIELDS
OUTPUTS = SIXTH + MATMUL_FIELDS
"""Address the layer's output is copied to, 0 for none."""
FIELDS = OUTPUTS + 1

SLOTS, NEW, HIDDEN, INNER = range(4)
"""Fields of a pass. SLOTS: sequences. NEW: most new rows of one, and of each if layers have mixers. INNER: width of the
widest MLP."""
PLACES, ROTATED, ROTARY_WIDTH, PAIRED = range(4, 8)
"""Addresses of the rows' positions and of their cosines and sines, by rotary type; numbers per row of these (a layer
may read fewer); 1 if pairs are adjacent."""
INPUTS, INPUTS_STRIDE = range(8, 10)
"""Address of the layers' own inputs, and the stride between their rows."""
MASK, MASK_SLOT, MASK_ROW, THREAD_POOL, THREADS, PART = range(10, 16)
"""Address of the mask and its strides between sequences and rows; the open thread pool, 0 for none, and the number of
threads; the address of ``part_function``."""
SCALE, SOFTCAP, EPSILON, OFFSET, RESIDUAL, NORMS_ALL, TANH_GATE, EXPERT_SCRATCH = range(16, 24)
"""Bits of the score factor and cap; of the norms' epsilon and weight offset; of the residual factor. NORMS_ALL: queries
and keys are normed across heads. TANH_GATE: the MLP has a GELU. EXPERT_SCRATCH: scratch numbers of experts per row."""
GATES_HEADS, MIXER_PART, ORIGINS, JOURNAL, ADVANCES, MIXER_ROW, MIXER_STATE, MIXER_WINDOW = range(24, 32)
"""GATES_HEADS: queries have output gates. MIXER_PART: address of ``mixer_function``. ORIGINS, JOURNAL: addresses of
each row's origin and of what is kept of rows. ADVANCES: states move past the last row. MIXER_ROW, MIXER_STATE,
MIXER_WINDOW: scratch numbers per row, per state and for a sequence's columns."""
TOTAL_ROWS, ROW_OFFSETS, WOKEN = range(MIXER_WINDOW + 1, MIXER_WINDOW + 4)
"""Rows of all sequences; address of where each sequence's rows begin, and the end; distinct experts that the pass has
woken so far, summed over layers."""
PASS_FIELDS = WOKEN + 1

Numbers = npt.NDArray[np.int64]


@compiled
def multiply(shape: Numbers, layer: Numbers, which: int, inputs: int, rows: int, outputs: int) -> None:
    multiply_by(shape, layer, which * MATMUL_FIELDS, inputs, rows, outputs)


@compiled
def multiply_by(shape: Numbers, layer: Numbers, field: int, inputs: int, rows: int, outputs: int) -> None:
    """Multiply by the matrix whose fields begin at ``field``."""
    matmul, matrix, out_features, columns, bias = layer[field : field + MATMUL_FIELDS]
    parallel_matmul(
        shape[THREAD_POOL], shape[THREADS], matmul, matrix, out_features, columns, inputs, rows, outputs, bias
    )


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
    """Run a step between matmuls, on the thread pool if there is enough work."""
    thread_pool = shape[THREAD_POOL] if work >= MIN_PARALLEL_WEIGHTS else 0
    addresses = shape.ctypes.data, layer.ctypes.data, starts.ctypes.data
    run_parallel(thread_pool, shape[THREADS], function, *addresses, part, one, two, three, units, 1)


EMBED, EMBEDDING, MULTIPLIER, PROJECT, PROJECTION, OUT_FEATURES, EMBED_SCALE, NORM, EMBED_WIDTH, SHARE = range(10)
"""Record of the layers' own inputs: addresses of ``embedding_of`` a format and of the token embedding, and the bits of
its factor; addresses of the projection's matmul and matrix, their out_features and the bits of their factor; address of
the norm's weight and its width, which is one layer's; bits of the factor of the sum."""
INPUT_FIELDS = SHARE + 1


@compiled
def layer_input_numbers(stride: int, rows: int) -> int:
    """Float32 numbers ``compute_layer_inputs`` needs: all inputs and one more row."""
    return (rows + 1) * stride


@compiled
def compute_layer_inputs(shape: Numbers, record_at: int, ids_at: int, rows: int, embedded: int, written: int) -> None:
    """Write all layers' own inputs, row by row, by the record at an address."""
    record = array_at(record_at, (INPUT_FIELDS,), np.int64)
    stride, width = record[OUT_FEATURES], record[EMBED_WIDTH]
    matmul, matrix = record[PROJECT], record[PROJECTION]
    parallel_matmul(
        shape[THREAD_POOL], shape[THREADS], matmul, matrix, stride, shape[HIDDEN], embedded, rows, written, 0
    )
    scale_in_place(written, rows * stride, float_of(record, EMBED_SCALE))
    epsilon, offset = float_of(shape, EPSILON), float_of(shape, OFFSET)
    norm_rows(written, rows * stride // width, width, record[NORM], offset, epsilon, written)
    token_row = written + rows * stride * ITEM_SIZE
    for row in range(rows):
        call_at(record[EMBED], record[EMBEDDING], stride, ids_at + row * WORD_SIZE, 1, token_row, 0, 0, 0, 0)
        scale_in_place(token_row, stride, float_of(record, MULTIPLIER))
        add_in_place(written + row * stride * ITEM_SIZE, token_row, stride, np.float32(1))
    scale_in_place(written, rows * stride, float_of(record, SHARE))
