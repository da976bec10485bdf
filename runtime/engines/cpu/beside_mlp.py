"""A mixture of experts beside the MLP of a layer: both read the output of attention, and what they give is added."""

from __future__ import annotations

import numpy as np

from hdtool.runtime.engines.cpu.layer_calls import multiply_by
from hdtool.runtime.engines.cpu.layer_record import EPSILON, HIDDEN, OFFSET, TEAM, THREADS, Numbers
from hdtool.runtime.kernels.compiled import compiled
from hdtool.runtime.kernels.elementwise import add_in_place, norm_rows, scale_in_place
from hdtool.runtime.kernels.experts import FIELDS as EXPERT_FIELDS
from hdtool.runtime.kernels.experts import NUMBER, mix_experts
from hdtool.runtime.kernels.memory.raw_memory import array_at, float_of
from hdtool.runtime.kernels.routing import ROUTE, ROUTER_FIELDS, TOP, route
from hdtool.runtime.kernels.vector_code import ITEM_SIZE

EXPERTS, ROUTER, NORM_DENSE, NORM_READ, NORM_MIXED, NORM_ROUTED, FACTOR, SHARES = range(8)
"""Addresses of the records of the experts and of what chooses them; of the weights of norms: of the output of the MLP,
of what experts read, of what they give, and of what the router reads, which is multiplied by a factor, here by its
bits; and of what the share of each expert is multiplied by."""
BESIDE_FIELDS = SHARES + 1


@compiled
def add_experts(shape: Numbers, at: int, attended: int, rows: int, dense: int, scratch: int) -> None:
    """Norm the output of an MLP, and add that of experts, by the record at an address; rows of hidden states."""
    record = array_at(at, (BESIDE_FIELDS,), np.int64)
    experts = array_at(record[EXPERTS], (EXPERT_FIELDS,), np.int64)
    router = array_at(record[ROUTER], (ROUTER_FIELDS,), np.int64)
    number, width, top = experts[NUMBER], shape[HIDDEN], router[TOP]
    epsilon, offset, team, threads = float_of(shape, EPSILON), float_of(shape, OFFSET), shape[TEAM], shape[THREADS]
    read = scratch + rows * number * ITEM_SIZE
    mixed = read + rows * width * ITEM_SIZE
    norm_rows(dense, rows, width, record[NORM_DENSE], offset, epsilon, dense)
    norm_rows(attended, rows, width, record[NORM_ROUTED], np.float32(0), epsilon, read)
    scale_in_place(read, rows * width, float_of(record, FACTOR))
    multiply_by(shape, router, ROUTE, read, rows, scratch)
    chosen, shares = np.empty((rows, top), np.int64), np.empty((rows, top), np.float32)
    route(router, array_at(scratch, (rows, number), np.float32), chosen, shares)
    factors = array_at(record[SHARES], (number,), np.float32)
    for row in range(rows):
        for rank in range(top):
            shares[row, rank] *= factors[chosen[row, rank]]
    norm_rows(attended, rows, width, record[NORM_READ], offset, epsilon, read)
    mix_experts(team, threads, experts, chosen, shares, read, mixed, mixed + rows * width * ITEM_SIZE)
    norm_rows(mixed, rows, width, record[NORM_MIXED], offset, epsilon, mixed)
    add_in_place(dense, mixed, rows * width, np.float32(1))
