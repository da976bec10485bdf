"""Defines the records that describe a pass and its layers to compiled code: arrays of int64 fields, mostly addresses.

Address 0 means that a layer lacks the part. Fields called "bits" hold the bits of a float32 value.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hdtool.runtime.kernels.compiled import WORD_SIZE, Ints, array_at, compiled, float_of
from hdtool.runtime.kernels.gemm import call_at
from hdtool.runtime.kernels.thread_pool import MIN_PARALLEL_WEIGHTS, parallel_matmul, run_parallel
from hdtool.runtime.kernels.vector_code import ITEM_SIZE, add_in_place, norm_rows, scale_in_place

TO_QUERIES, TO_KEYS, TO_VALUES, TO_OUTPUT, TO_GATE, TO_UP, TO_DOWN = range(7)
"""Indices of a layer's matmuls, each of which has ``MATMUL_FIELDS`` fields at the start of the layer's record."""
MATMUL_FIELDS = 5
"""Number of fields per matmul: addresses of function and matrix, the matrix's rows and columns, the bias's address."""
(
    NORM_BEFORE_MIXER,
    NORM_AFTER_MIXER,
    NORM_BEFORE_MLP,
    NORM_AFTER_MLP,
    NORM_Q,
    NORM_K,
    SINKS,
    KEYS,
    VALUES,
    WINDOW,
    ROTARY,
) = range(7 * MATMUL_FIELDS, 7 * MATMUL_FIELDS + 11)
EXPERTS, ROUTER = range(ROTARY + 1, ROTARY + 3)
"""Norms, attention and experts of a layer.

NORM_BEFORE_MIXER to NORM_K: addresses of norm weights, for the norms before and after attention or a mixer, before and
after the MLP, and of queries and keys. SINKS: address of attention sinks. KEYS, VALUES: addresses in the KV cache; a
layer without a matmul for keys only reads there. WINDOW: number of positions that a row attends to, 0 for all. ROTARY:
index of the rotary type, -1 for none. EXPERTS, ROUTER: addresses of the records of the experts and their router; a
layer with experts uses the MLP's matmuls for the shared expert, if the layer has one.
"""
HEADS, GROUPS, WIDTH, LAYER_ROTARY_WIDTH, SLOT_STRIDE, HEAD_STRIDE, NORM_V = range(ROUTER + 1, ROUTER + 8)
"""Heads of a layer.

HEADS: key heads. GROUPS: query heads per key head. WIDTH: head width. LAYER_ROTARY_WIDTH: rotated part of the width.
SLOT_STRIDE, HEAD_STRIDE: strides of the KV cache between sequences and between heads, in float32 values. NORM_V:
address of the weight of the values' norm. Without a matmul for values, the values are copied from the keys before the
keys are normalized.
"""
INPUT_GATE = NORM_V + 1
INPUT_OUT = INPUT_GATE + MATMUL_FIELDS
INPUT_AT, NORM_INPUT, FACTOR, ADDED_MIXTURE = range(INPUT_OUT + MATMUL_FIELDS, INPUT_OUT + MATMUL_FIELDS + 4)
"""A layer's per-layer input, which is gated and added after the MLP, and two parts that few layers have.

INPUT_GATE, INPUT_OUT: first fields of the matmuls before and after the gate. INPUT_AT: offset of the layer's input in a
row of all layers' inputs. NORM_INPUT: address of the norm's weight. FACTOR: address of the factor that scales the
layer's output. ADDED_MIXTURE: address of the record of a mixture of experts that is added to the MLP.
"""
MIXER = ADDED_MIXTURE + 1
"""Kind of the layer's token mixer: one of the four values below."""
ATTENTION, SHORT_CONVOLUTION, DELTA_RULE, MAMBA2 = range(4)
TAPS, COLUMNS, CHANNELS, CONV_WEIGHT, CONV_BIAS, CONV_STATE, CONV_STRIDE = range(MIXER + 1, MIXER + 8)
"""A mixer's convolution.

TAPS, COLUMNS, CHANNELS: numbers of taps, state columns and channels. CONV_WEIGHT, CONV_BIAS, CONV_STATE: addresses of
the weight ``[taps, channels]``, the bias and the state ``[channels, columns]``. CONV_STRIDE: stride between the states
of sequences.
"""
STATE, STATE_STRIDE, KEY_HEADS, STATE_HEADS, KEY_WIDTH, VALUE_WIDTH = range(MIXER + 8, MIXER + 14)
"""A recurrence's state: address, stride between sequences, key heads, state heads, key width and value width."""
DECAY_LOG, STEP_BIAS, SKIP, GATE_NORM, GATE_EPSILON = range(MIXER + 14, MIXER + 19)
"""DECAY_LOG, STEP_BIAS, SKIP: addresses of each head's log decay rate, time-step bias and skip factor. GATE_NORM,
GATE_EPSILON: address of the gated norm's weight and bits of the norm's epsilon."""
JOURNAL_AT, STRENGTH, FOURTH = range(MIXER + 19, MIXER + 22)
"""JOURNAL_AT: number of float32 values that earlier layers keep per row. STRENGTH: bits of the factor of a delta rule's
write strengths. FOURTH: first field of the matmul for a mixer's fourth input.

If a delta rule has a fifth and a sixth input, the first, fifth and sixth give queries, keys and values. A delta rule
without a fourth input has two inputs, grouped by key head: the first gives queries, keys, values and gates, and the
second gives write strengths and time steps.
"""
FIFTH, SIXTH = FOURTH + MATMUL_FIELDS, FOURTH + 2 * MATMUL_FIELDS
OUTPUTS = SIXTH + MATMUL_FIELDS
"""Address to which the layer's output is copied; 0 for none."""
FIELDS = OUTPUTS + 1

SLOTS, NEW, HIDDEN, INNER = range(4)
"""First fields of a pass. SLOTS: number of sequences. NEW: maximum number of new rows in a sequence; all sequences have
that many if layers have mixers. HIDDEN: width of hidden states. INNER: maximum width of an MLP or per-layer input."""
ROW_POSITIONS, ROTARY_TABLES, ROTARY_WIDTH, INTERLEAVED = range(4, 8)
"""ROW_POSITIONS: address of the rows' positions. ROTARY_TABLES: address of their cosines and sines ``[rotary types, 2,
rows, width]``. ROTARY_WIDTH: this ``width``, of which a layer may read less. INTERLEAVED: 1 if rotary pairs are
adjacent elements."""
INPUTS, INPUTS_STRIDE = range(8, 10)
"""Address of the per-layer inputs ``[rows, layers * width]``, and the stride between rows."""
MASK, MASK_SLOT, MASK_ROW, THREAD_POOL, THREADS, STEP_FUNCTION = range(10, 16)
"""MASK, MASK_SLOT, MASK_ROW: address of the mask, and its strides between sequences and rows. THREAD_POOL: the open
thread pool, 0 for none. THREADS: number of threads. STEP_FUNCTION: address of ``step_function``."""
SCALE, SOFTCAP, EPSILON, OFFSET, RESIDUAL, NORMS_ALL, TANH_GATE, EXPERT_SCRATCH = range(16, 24)
"""SCALE, SOFTCAP: bits of the factor and the softcap of attention scores. EPSILON, OFFSET: bits of the norms' epsilon
and of the norm weights' offset. RESIDUAL: bits of the residual factor. NORMS_ALL: 1 if queries and keys are normed
across all heads. TANH_GATE: 1 if gates use a tanh GELU instead of a SiLU. EXPERT_SCRATCH: scratch memory for experts
per row, in float32 values."""
GATES_HEADS, MIXER_FUNCTION, ORIGINS, JOURNAL, ADVANCES, MIXER_ROW, MIXER_STATE, MIXER_WINDOW = range(24, 32)
"""GATES_HEADS: 1 if query heads have output gates. MIXER_FUNCTION: address of ``mixer_function``. ORIGINS: address of
the rows' origins, see ``convolution``. JOURNAL: address of the values that mixers keep for the rows. ADVANCES: 1 if
the pass advances the mixers' states past its last row. MIXER_ROW, MIXER_STATE, MIXER_WINDOW: scratch memory of a mixer
per row, per buffered state and per sequence for the convolution's columns, in float32 values."""
TOTAL_ROWS, ROW_OFFSETS, ACTIVE_EXPERTS, EXPERT_FUNCTION = range(MIXER_WINDOW + 1, MIXER_WINDOW + 5)
"""TOTAL_ROWS: number of rows in all sequences. ROW_OFFSETS: address of each sequence's first row, followed by
TOTAL_ROWS. ACTIVE_EXPERTS: number of distinct experts used so far in the pass, summed over layers. EXPERT_FUNCTION:
address of ``expert_function``; 0 in models without experts."""
PASS_FIELDS = EXPERT_FUNCTION + 1

Record = npt.NDArray[np.int64]


@compiled
def multiply(pass_record: Record, layer: Record, which: int, inputs: int, rows: int, outputs: int) -> None:
    multiply_by(pass_record, layer, which * MATMUL_FIELDS, inputs, rows, outputs)


@compiled
def multiply_by(pass_record: Record, layer: Record, field: int, inputs: int, rows: int, outputs: int) -> None:
    """Multiply ``rows`` rows at ``inputs`` by the matrix whose fields begin at ``field``; write to ``outputs``."""
    matmul, matrix, out_features, columns, bias = layer[field : field + MATMUL_FIELDS]
    parallel_matmul(
        pass_record[THREAD_POOL],
        pass_record[THREADS],
        matmul,
        matrix,
        out_features,
        columns,
        inputs,
        rows,
        outputs,
        bias,
    )


@compiled
def compute_step(
    pass_record: Record,
    function: int,
    layer: Record,
    starts: Ints,
    step: int,
    one: int,
    two: int,
    three: int,
    units: int,
    work: int,
) -> None:
    """Run ``step`` of the C function at ``function`` for ``units`` units, on the thread pool if ``work`` is large.

    The meaning of ``one``, ``two`` and ``three``, mostly addresses, depends on the step.
    """
    thread_pool = pass_record[THREAD_POOL] if work >= MIN_PARALLEL_WEIGHTS else 0
    addresses = pass_record.ctypes.data, layer.ctypes.data, starts.ctypes.data
    run_parallel(thread_pool, pass_record[THREADS], function, *addresses, step, one, two, three, units, 1)


EMBED, EMBEDDING, MULTIPLIER, PROJECT, PROJECTION, OUT_FEATURES, EMBED_SCALE, NORM, EMBED_WIDTH, INPUT_SCALE = range(10)
"""Record of the per-layer inputs.

EMBED, EMBEDDING, MULTIPLIER: addresses of the ``embedding_of`` function and of the token embedding, and bits of the
embedding's factor. PROJECT, PROJECTION, OUT_FEATURES, EMBED_SCALE: addresses of the projection's matmul and matrix, its
out_features, and bits of its factor. NORM, EMBED_WIDTH: address of the norm's weight, and the width of the norm and of
one layer's input. INPUT_SCALE: bits of the factor that scales the sum of token embedding and normalized
projection.
"""
INPUT_FIELDS = INPUT_SCALE + 1


@compiled
def layer_inputs_size(stride: int, rows: int) -> int:
    """Return how many float32 values ``compute_layer_inputs`` writes: the inputs of all rows, and a scratch row."""
    return (rows + 1) * stride


@compiled
def compute_layer_inputs(
    pass_record: Record, record_at: int, ids_at: int, rows: int, embedded: int, written: int
) -> None:
    """Write the per-layer inputs of ``rows`` tokens to ``written``, which needs room for ``rows + 1`` rows.

    ``record_at``, ``ids_at`` and ``embedded`` are the addresses of the inputs' record, the token ids and the main
    embeddings.
    """
    record = array_at(record_at, (INPUT_FIELDS,), np.int64)
    stride, width = record[OUT_FEATURES], record[EMBED_WIDTH]
    matmul, matrix = record[PROJECT], record[PROJECTION]
    parallel_matmul(
        pass_record[THREAD_POOL],
        pass_record[THREADS],
        matmul,
        matrix,
        stride,
        pass_record[HIDDEN],
        embedded,
        rows,
        written,
        0,
    )
    scale_in_place(written, rows * stride, float_of(record, EMBED_SCALE))
    epsilon, offset = float_of(pass_record, EPSILON), float_of(pass_record, OFFSET)
    norm_rows(written, rows * stride // width, width, record[NORM], offset, epsilon, written)
    token_row = written + rows * stride * ITEM_SIZE
    for row in range(rows):
        call_at(record[EMBED], record[EMBEDDING], stride, ids_at + row * WORD_SIZE, 1, token_row, 0, 0, 0, 0)
        scale_in_place(token_row, stride, float_of(record, MULTIPLIER))
        add_in_place(written + row * stride * ITEM_SIZE, token_row, stride, np.float32(1))
    scale_in_place(written, rows * stride, float_of(record, INPUT_SCALE))
