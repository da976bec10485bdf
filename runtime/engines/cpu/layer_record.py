"""What compiled code reads of a pass and of each layer: arrays of integers, most of them addresses.

A family of models is a description: a layer lacks what has address 0. Floats are there by their bits.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

TO_QUERIES, TO_KEYS, TO_VALUES, TO_OUTPUT, TO_GATE, TO_UP, TO_DOWN = range(7)
"""The matmuls of a layer."""
MATMUL_FIELDS = 5
"""Addresses of the compiled matmul and of the matrix, rows and columns of it, address of the bias."""
NORM_BEFORE, NORM_MIXED, NORM_MIDDLE, NORM_END, NORM_Q, NORM_K, SINKS, KEYS, VALUES, WINDOW, ROTARY = range(
    7 * MATMUL_FIELDS, 7 * MATMUL_FIELDS + 11
)
"""Addresses of the weights of norms: before attention, of its output, before the MLP, of its output, of queries and of
keys; of the sinks of attention, and of the layer's keys and values. Then the positions that a row sees, 0 for all; and
the number of the kind of rotary positions, -1 for none."""
FIELDS = ROTARY + 1

SLOTS, NEW, HEADS, GROUPS, WIDTH, HIDDEN, INNER = range(7)
"""Of a pass: sequences and new rows of each, then shapes; ``INNER`` is that of the widest MLP."""
PLACES, ROTATED, TURNED, PAIRED = range(7, 11)
"""Addresses of the positions of rows, and of their cosines and sines, one kind after another; the numbers of a head
that are rotated, and whether their pairs are side by side."""
SLOT_STRIDE, HEAD_STRIDE, MASK, MASK_SLOT, MASK_ROW, TEAM, THREADS, PART = range(11, 19)
"""Numbers from one sequence, head or row of the mask to the next; the open team of threads, 0 for none, and their
number; the address of ``part_function``."""
SCALE, SOFTCAP, EPSILON, OFFSET, RESIDUAL, NORMS_ALL, TANH_GATE = range(19, 26)
"""The factor of scores, and what bounds them; of norms, the epsilon and what is added to weights; the factor of what is
added to hidden states; whether queries, and keys, are normed as a whole; whether the MLP has a GELU."""
PASS_FIELDS = TANH_GATE + 1

Numbers = npt.NDArray[np.int64]


def bits(number: float) -> int:
    """Those of a float32."""
    return int(np.float32(number).view(np.int32))
