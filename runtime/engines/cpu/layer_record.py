"""Defines the records that describe a pass and its layers to compiled code, and basic operations that read them.

An address is 0 if a layer or pass lacks the part. Strides and sizes count float32 values.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from hdtool.runtime.kernels.compiled import WORD_SIZE, Ints, Record, array_at, caller_of, compiled, struct_address
from hdtool.runtime.kernels.layer_norm import layer_norm_rows
from hdtool.runtime.kernels.matmul import MATMUL
from hdtool.runtime.kernels.mixture_of_experts import EXPERTS, ROUTER
from hdtool.runtime.kernels.row_operations import (
    add_in_place,
    norm_rows,
    rotate_head,
    rotate_pairs,
    scale_columns,
    scale_in_place,
)
from hdtool.runtime.kernels.thread_pool import MIN_PARALLEL_WEIGHTS, parallel_matmul, run_parallel
from hdtool.runtime.kernels.vector_code import ITEM_SIZE

NO_MIXER, SHORT_CONVOLUTION, DELTA_RULE, MAMBA2 = range(4)
"""Kinds of token mixers in place of attention, or besides it."""

NORM = np.dtype(
    [
        ("weight", np.int64),  # address, 0 if there is no norm
        ("bias", np.int64),  # address, only of a LayerNorm
        ("stride", np.int64),  # between the weights of a LayerNorm's rows, 0 if all rows have the same weight
    ],
    align=True,
)
"""A norm of hidden states, heads or latent vectors."""
ADDED_MIXTURE = np.dtype(
    [
        # Addresses of norm weights.
        ("norm_mlp_output", np.int64),
        ("norm_experts_input", np.int64),
        ("norm_experts_output", np.int64),
        ("norm_router_input", np.int64),
        ("router_input_factor", np.float32),  # scales the router's input
        ("expert_scales", np.int64),  # address of the factors that scale the experts' outputs
    ],
    align=True,
)
"""A mixture of experts that is added to an MLP."""

LATENTS = np.dtype(
    [
        ("queries", MATMUL),  # whose output the attention's ``queries`` reads; none if these read what the layer reads
        ("gate", MATMUL),  # whose sigmoids scale the heads; none if they aren't scaled
        ("expansion", np.int64),  # address of the float32 weight ``[heads, plain + values, rank]``
        ("plain", np.int64),  # width of the first part of a query or key
        ("rotated", np.int64),  # width of the second part, which may be rotated
        ("values", np.int64),  # width of a head's values
        ("key_slot_stride", np.int64),  # between sequences in the cache of rotated keys
        ("norm_queries", NORM),  # of latent queries
        ("norm", NORM),  # of latent vectors
        ("epsilon", np.float32),  # of both norms
    ],
    align=True,
)
"""Fields of an attention that caches latent vectors instead of keys, and rotated keys instead of values.

The attention's matmul ``keys`` computes the latent vectors and the keys to rotate.
"""
ATTENTION = np.dtype(
    [
        ("queries", MATMUL),  # none in layers without attention
        ("keys", MATMUL),  # none if the layer only reads the cached keys and values of another layer
        ("values", MATMUL),  # none if values are copied from the keys before these are normalized
        ("out", MATMUL),
        ("latents", LATENTS),
        ("heads", np.int64),  # key heads
        ("groups", np.int64),  # query heads per key head
        ("width", np.int64),  # of a head or latent vector
        ("window", np.int64),  # number of positions that a row attends to, 0 for all
        ("rotary", np.int64),  # index of the rotary type, -1 for none
        ("rotary_width", np.int64),  # rotated part of the width
        ("sinks", np.int64),  # address of the attention sinks
        ("cached_keys", np.int64),  # address in the KV cache
        ("cached_values", np.int64),
        ("slot_stride", np.int64),  # between sequences in the KV cache
        ("head_stride", np.int64),
        ("norm_queries", NORM),
        ("norm_keys", NORM),
        ("norm_values", np.int64),  # address of the weight
    ],
    align=True,
)

CONVOLUTION = np.dtype(
    [
        ("taps", np.int64),  # which are also the state's columns
        ("channels", np.int64),
        ("weight", np.int64),  # address of the weight ``[taps, channels]``
        ("bias", np.int64),  # address
        ("state", np.int64),  # address of the state ``[channels, taps]``
        ("state_stride", np.int64),  # between sequences
    ],
    align=True,
)
DELTA = np.dtype(
    [
        # Further matmuls. Without ``keys``, the mixer's ``inputs`` give queries, keys and values; with them, queries.
        # Without ``steps``, there are two matmuls, grouped by key head: ``inputs`` give queries, keys, values and
        # gates, and ``strengths`` give write strengths and time steps.
        ("keys", MATMUL),
        ("values", MATMUL),
        ("gates", MATMUL),
        ("strengths", MATMUL),
        ("steps", MATMUL),
        ("gate_input", MATMUL),  # whose output ``gates`` reads; only in a delta attention
        ("decay_input", MATMUL),  # whose output ``steps`` reads; only in a delta attention
        ("decay_width", np.int64),  # number of decays of a head: one, or in a delta attention one per key channel
        ("decay_bound", np.float32),  # lower bound of the decays' logarithms, 0 if they are unbounded
        ("strength", np.float32),  # factor of the write strengths
    ],
    align=True,
)
"""Fields of a mixer's record that only a delta rule has."""
SCAN = np.dtype(
    [
        ("skip", np.int64),  # address of each head's skip factor
        ("gates_after_norm", np.bool_),  # True if a gate scales the gated norm's output, not its input
        ("min_step", np.float32),  # lower bound of time steps in passes over prompts
    ],
    align=True,
)
"""Fields of a mixer's record that only a Mamba-2 scan has."""
MIXER = np.dtype(
    [
        ("kind", np.int64),
        ("inputs", MATMUL),
        ("out", MATMUL),
        ("convolution", CONVOLUTION),
        ("journal_offset", np.int64),  # number of float32 values that earlier layers keep per row
        # A recurrence, which short convolutions lack.
        ("state", np.int64),  # address
        ("state_stride", np.int64),  # between sequences
        ("key_heads", np.int64),
        ("heads", np.int64),  # of the state
        ("key_width", np.int64),
        ("value_width", np.int64),
        ("decay_log", np.int64),  # address of each head's log decay rate
        ("step_bias", np.int64),  # address of the biases of time steps, one for each decay
        ("norm", np.int64),  # address of the gated norm's weight
        ("epsilon", np.float32),  # of the gated norm
        ("delta", DELTA),
        ("scan", SCAN),
    ],
    align=True,
)

ADAPTER = np.dtype([("first", MATMUL), ("second", MATMUL)], align=True)
"""Two consecutive matmuls, whose output is added to that of another matmul; zeros without an adapter."""
ADAPTERS = np.dtype([(name, ADAPTER) for name in ("queries", "keys", "values", "gate", "up")], align=True)

LAYER = np.dtype(
    [
        ("attention", ATTENTION),
        ("mixer", MIXER),  # in place of attention, or besides it
        ("norm_before_mixer", NORM),
        ("norm_after_mixer", NORM),
        ("norm_before_mlp", NORM),
        ("norm_after_mlp", NORM),
        # The MLP, or the shared expert of a layer with experts. Layers may have neither.
        ("gate", MATMUL),
        ("up", MATMUL),  # none if the MLP has no gate
        ("down", MATMUL),
        ("has_experts", np.bool_),  # apart from those of an added mixture
        ("has_added_mixture", np.bool_),
        ("experts", EXPERTS),
        ("router", ROUTER),
        ("added_mixture", ADDED_MIXTURE),
        # The per-layer input, which is gated and added after the MLP.
        ("input_gate", MATMUL),  # before the gate
        ("input_out", MATMUL),  # after the gate
        ("input_offset", np.int64),  # of the layer's input in a row of all layers' inputs
        ("norm_input", NORM),
        ("factor", np.int64),  # address of the factor that scales the layer's output
        ("watched", np.int64),  # address to which the layer's output is copied
        # What makes attention and MLP a block beside the mixer.
        ("side_norm", NORM),  # of hidden states joined with embeddings, which attention reads
        ("side_out", MATMUL),  # whose output is added to the hidden states for the mixer; none without such a block
        ("adapters", ADAPTERS),
    ],
    align=True,
)

PASS = np.dtype(
    [
        ("slots", np.int64),  # number of sequences
        ("new", np.int64),  # maximum number of new rows in a sequence; with mixers, all sequences have that many
        ("total_rows", np.int64),  # number of rows in all sequences
        ("starts", np.int64),  # address of the cache position of each sequence's first row
        ("row_offsets", np.int64),  # address of each sequence's first row, followed by ``total_rows``
        ("row_positions", np.int64),  # address of the rows' positions
        ("hidden", np.int64),  # width of hidden states
        ("inner", np.int64),  # maximum width of an MLP or per-layer input
        ("epsilon", np.float32),  # of the norms
        ("norm_offset", np.float32),  # added to the weights of RMSNorms
        ("centers_norms", np.bool_),  # True for LayerNorms, False for RMSNorms
        ("is_parallel", np.bool_),  # True if the MLP reads the rows that attention reads
        ("residual", np.float32),  # factor of what is added to the hidden states
        ("activation", np.int64),  # of MLPs and per-layer inputs, see ``row_operations.ACTIVATIONS``
        # Attention.
        ("rotary_tables", np.int64),  # address of the rows' cosines and sines ``[rotary types, 2, rows, width]``
        ("rotary_width", np.int64),  # this ``width``, of which a layer may read less
        ("interleaved", np.bool_),  # True if rotary pairs are adjacent elements
        ("splits_pairs", np.bool_),  # True if rotary pairs are adjacent elements that rotation moves to two halves
        ("mask", np.int64),  # address
        ("mask_slot_stride", np.int64),
        ("mask_row_stride", np.int64),
        ("scale", np.float32),  # factor of attention scores
        ("softcap", np.float32),  # of attention scores
        ("norms_all_heads", np.bool_),  # True if queries and keys are normed across all heads
        ("gates_heads", np.bool_),  # True if query heads have output gates
        # Per-layer inputs.
        ("inputs", np.int64),  # address of the inputs ``[rows, layers * width]``
        ("inputs_stride", np.int64),  # between rows
        # Blocks beside mixers.
        ("has_side_blocks", np.bool_),
        ("embedded", np.int64),  # address of the rows' embeddings, if there are side blocks
        # Threads and functions.
        ("thread_pool", np.int64),  # the open thread pool, 0 for none
        ("threads", np.int64),  # number of threads
        ("step_function", np.int64),  # address of ``step_function``
        ("mixer_function", np.int64),  # address of ``mixer_function``
        ("expert_function", np.int64),  # address of ``expert_function``; 0 in models without experts
        ("latent_function", np.int64),  # address of ``latent_function``; 0 in models without latent attention
        # Experts.
        ("expert_scratch", np.int64),  # scratch memory per row
        ("active_experts", np.int64),  # number of distinct experts used so far in the pass, summed over layers
        # Mixers.
        ("origins", np.int64),  # address of the rows' origins, see ``convolution``
        ("journal", np.int64),  # address of the values that mixers keep for the rows
        ("advances", np.bool_),  # True if the pass advances the mixers' states past its last row
        ("mixer_row", np.int64),  # scratch memory per row
        ("mixer_state", np.int64),  # scratch memory per buffered state
        ("mixer_window", np.int64),  # scratch memory per sequence, for the convolution's columns
    ],
    align=True,
)

LAYER_INPUTS = np.dtype(
    [
        ("embed", np.int64),  # address of the ``embedding_of`` function
        ("embedding", np.int64),  # address of the token embedding
        ("multiplier", np.float32),  # factor of the embedding
        ("projection", MATMUL),
        ("scale", np.float32),  # factor of the projection
        ("input_scale", np.float32),  # factor of the sum of token embedding and normalized projection
        ("norm", np.int64),  # address of the norm's weight
        ("width", np.int64),  # of the norm and of one layer's input
    ],
    align=True,
)

EMBED = types.void(*[types.int64] * 5)
"""Signature of an ``embedding_of`` function: the embedding, its columns, ids, rows and the address to write to."""
call_embed = caller_of(EMBED)


@compiled
def multiply(pass_record: Record, matmul: Record, inputs: int, rows: int, outputs: int) -> None:
    """Multiply ``rows`` rows at ``inputs`` by a matrix, plus bias and times factors, if any; write to ``outputs``."""
    parallel_matmul(
        pass_record.thread_pool,
        pass_record.threads,
        matmul.kernels,
        matmul.matrix,
        matmul.out_features,
        matmul.columns,
        inputs,
        rows,
        outputs,
        matmul.bias,
    )
    if matmul.factors:
        scale_columns(outputs, matmul.factors, matmul.out_features, rows)


@compiled
def multiply_adapted(
    pass_record: Record, matmul: Record, adapter: Record, read: int, rows: int, scratch: int, written: int
) -> None:
    """Call ``multiply`` and then add the output of the matmul's adapter, if it has one."""
    multiply(pass_record, matmul, read, rows, written)
    if adapter.first.kernels:
        added = scratch + rows * adapter.first.out_features * ITEM_SIZE
        multiply(pass_record, adapter.first, read, rows, scratch)
        multiply(pass_record, adapter.second, scratch, rows, added)
        add_in_place(written, added, rows * matmul.out_features, np.float32(1))


@compiled
def apply_norm(pass_record: Record, norm: Record, epsilon: Any, read: int, rows: int, width: int, written: int) -> None:
    """Normalize ``rows`` contiguous rows of ``width`` numbers at ``read`` and write them to ``written``."""
    if pass_record.centers_norms:
        layer_norm_rows(read, rows, width, norm.weight, norm.stride, norm.bias, epsilon, written)
    else:
        norm_rows(read, rows, width, norm.weight, pass_record.norm_offset, epsilon, written)


@compiled
def rotate(pass_record: Record, attention: Record, row: int, read: int, width: int, written: int) -> None:
    """Write the rotated form of the first ``width`` numbers of a query or key."""
    rows, row_size = pass_record.total_rows, pass_record.rotary_width * ITEM_SIZE
    cos = pass_record.rotary_tables + (attention.rotary * 2 * rows + row) * row_size
    sin = cos + rows * row_size
    if pass_record.interleaved:
        rotate_pairs(read, cos, sin, width, written)
    else:
        rotate_head(read, cos, sin, width, written)


@compiled
def starts_of(pass_record: Record) -> Ints:
    """Return the cache position of each sequence's first row."""
    return array_at(pass_record.starts, (pass_record.slots,), types.int64)


@compiled
def offsets_of(pass_record: Record) -> Ints:
    """Return the index of each sequence's first row, followed by the total number of rows."""
    return array_at(pass_record.row_offsets, (pass_record.slots + 1,), types.int64)


@compiled
def compute_step(
    pass_record: Record,
    function: int,
    layer: Record,
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
    thread_pool = pass_record.thread_pool if work >= MIN_PARALLEL_WEIGHTS else 0
    arguments = struct_address(pass_record), struct_address(layer), step, one, two, three, units, work
    run_parallel(thread_pool, pass_record.threads, function, arguments, units, 1)


@compiled
def layer_inputs_size(stride: int, rows: int) -> int:
    """Return how many float32 values ``compute_layer_inputs`` writes: the inputs of all rows, and a scratch row."""
    return (rows + 1) * stride


@compiled
def compute_layer_inputs(
    pass_record: Record, inputs: Record, ids_at: int, rows: int, embedded: int, written: int
) -> None:
    """Write the per-layer inputs of ``rows`` tokens to ``written``, which needs room for ``rows + 1`` rows.

    ``ids_at`` and ``embedded`` are the addresses of the token ids and the main embeddings.
    """
    stride, width = inputs.projection.out_features, inputs.width
    multiply(pass_record, inputs.projection, embedded, rows, written)
    scale_in_place(written, rows * stride, inputs.scale)
    epsilon, offset = pass_record.epsilon, pass_record.norm_offset
    norm_rows(written, rows * stride // width, width, inputs.norm, offset, epsilon, written)
    token_row = written + rows * stride * ITEM_SIZE
    for row in range(rows):
        call_embed(inputs.embed, (inputs.embedding, stride, ids_at + row * WORD_SIZE, 1, token_row))
        scale_in_place(token_row, stride, inputs.multiplier)
        add_in_place(written + row * stride * ITEM_SIZE, token_row, stride, np.float32(1))
    scale_in_place(written, rows * stride, inputs.input_scale)
