"""Recurrences over a tree in closed form: all rows of a pass at once, from the states before them.

A chunked recurrence lets each token of a chunk read those before it. Over a tree each row reads its ancestors instead,
with the decay between both; rows come after their parents, so the same triangular system gives what each row writes.
No state is made for a row: the accepted path alone is written to the states.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.functional import softplus as softplus_of
from transformers.activations import ACT2FN

from hdtool.runtime.model.recurrent.tree_indices import TreeIndices

NOTHING = torch.empty(0)
"""Returned in the place of the last state, which no row of a tree has."""


class DeltaRows(NamedTuple):
    """What the rows of a gated delta rule write; leading dimensions may be those of several layers."""

    keys: torch.Tensor
    """``[..., slots, heads, rows, width]``"""
    values: torch.Tensor
    """What each row writes for its key."""
    decay: torch.Tensor
    """The logarithm of the decay from the state to each row, ``[..., slots, heads, rows, width or 1]``."""

    def write(self, slot: int, rows: Any, state: torch.Tensor) -> None:
        """Turn a state ``[..., heads, ...]`` into the one after a path of rows in a slot."""
        keys, values, decay = (one.select(-4, slot)[..., rows, :] for one in self)
        written = keys * (decay[..., -1:, :] - decay).exp()
        _decay_and_add(state, decay[..., -1, :].exp()[..., None], written, values)


class ScanRows(NamedTuple):
    """What the rows of a Mamba-2 scan write, as those of a gated delta rule do."""

    inputs: torch.Tensor
    """``[..., slots, heads, rows, width]``"""
    keys: torch.Tensor
    """``[..., slots, groups, rows, states]``"""
    decay: torch.Tensor
    """``[..., slots, heads, rows, 1]``"""

    def write(self, slot: int, rows: Any, state: torch.Tensor) -> None:
        inputs, keys, decay = (one.select(-4, slot)[..., rows, :] for one in self)
        written = inputs * (decay[..., -1:, :] - decay).exp()
        keys = keys.repeat_interleave(inputs.shape[-3] // keys.shape[-3], -3)
        _decay_and_add(state, decay[..., -1, :].exp()[..., None], written, keys)


def _decay_and_add(state: torch.Tensor, decay: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Multiply a state by its decay, and add the products of the rows, in place."""
    left = left.transpose(-1, -2)
    if state.dim() == 3 and state.dtype == left.dtype:
        state.mul_(decay).baddbmm_(left, right)  # makes no tensor of the size of the state
    else:
        state.copy_(torch.addcmul(left @ right, state.float(), decay))


def convolve(
    indices: TreeIndices,
    columns: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
) -> torch.Tensor:
    """A short convolution, ``[slots, channels, rows]``, over the columns of the state and of the rows."""
    slots, channels, width = columns.shape
    rows = indices.rows
    window = indices.window(width - rows, weight.shape[-1])
    places = window.flatten(1)[:, None].expand(-1, channels, -1)
    read = columns.gather(2, places).view(slots, channels, rows, -1)
    out = (read.float() * weight.float()[:, None]).sum(-1)
    if bias is not None:
        out = out + bias.float()[:, None]
    out = out.to(weight.dtype)
    if activation is not None:
        out = ACT2FN[activation](out)
    return out.to(columns.dtype)


def delta_rule(
    indices: TreeIndices,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    *,
    normalized: bool,
) -> tuple[torch.Tensor, DeltaRows]:
    """The gated delta rule: what each row reads, ``[slots, rows, heads, width]``, and what it writes.

    ``g`` is the logarithm of the decay, for each head or for each of the key's channels (Kimi's delta attention).
    """
    dtype, groups = query.dtype, value.shape[2] // key.shape[2]
    q, k, v, gate, strength = (one.transpose(1, 2).float() for one in (query, key, value, g, beta))
    if normalized:
        q, k = (one * (one.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for one in (q, k))
    q = q * q.shape[-1] ** -0.5
    if groups > 1:
        q, k = q.repeat_interleave(groups, 1), k.repeat_interleave(groups, 1)
    per_channel = gate.dim() == 4
    total = indices.sums[:, None] @ (gate if per_channel else gate[..., None])
    strong = k * strength[..., None]
    if per_channel:
        between = (total[:, :, :, None] - total[:, :, None]).masked_fill(indices.hidden[..., None], -torch.inf).exp()
        weighted = between * k[:, :, None]
        system, scores = (torch.einsum("bhic,bhijc->bhij", one, weighted) for one in (strong, q))
    else:
        between = (total - total.transpose(2, 3)).masked_fill(indices.hidden, -torch.inf).exp()
        system, scores = ((one @ k.transpose(2, 3)) * between for one in (strong, q))
    since = total.exp()
    held, read = (torch.cat([strong * since, q * since], 2) @ state.float()).split(q.shape[2], 2)
    right = v * strength[..., None] - held
    written = right
    if indices.rows > 1:
        written = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    out = (read + scores @ written).transpose(1, 2).contiguous().to(dtype)
    return out, DeltaRows(k, written, total)


def scan(
    indices: TreeIndices,
    hidden: torch.Tensor,
    dt: torch.Tensor,
    decay_rate: torch.Tensor,
    keys: torch.Tensor,
    queries: torch.Tensor,
    state: torch.Tensor,
    skip: torch.Tensor | None,
) -> tuple[torch.Tensor, ScanRows]:
    """The scan of Mamba-2: what each row reads, ``[slots, rows, heads, width]``, and what it writes."""
    heads, groups = hidden.shape[2], keys.shape[2]
    x = hidden.transpose(1, 2).float()
    step = dt.transpose(1, 2).float()
    b, c = (one.transpose(1, 2).float() for one in (keys, queries))
    total = indices.sums[:, None] @ (step * decay_rate.float()[:, None])[..., None]
    between = (total - total.transpose(2, 3)).masked_fill(indices.hidden, -torch.inf).exp()
    scores = (c @ b.transpose(2, 3)).repeat_interleave(heads // groups, 1) * between
    written = x * step[..., None]
    of_heads = c.repeat_interleave(heads // groups, 1) * total.exp()
    out = scores @ written + of_heads @ state.float().transpose(2, 3)
    if skip is not None:
        out = out + skip.float()[:, None, None] * x
    return out.transpose(1, 2).contiguous(), ScanRows(written, b, total)


def time_step(dt: torch.Tensor, bias: torch.Tensor | None, *, softplus: bool) -> torch.Tensor:
    """The time step of a scan as decoding computes it, which does not limit it."""
    dt = dt if bias is None else dt + bias.to(dt.dtype)
    return softplus_of(dt) if softplus else dt


def last_columns(columns: torch.Tensor, slot: int, rows: Sequence[int], before: int) -> torch.Tensor:
    """The state of a convolution after a path of rows: its last columns, ``[..., channels, before]``."""
    chosen = [*range(before), *(before + row for row in rows)]
    return columns.select(-3, slot)[..., index_of(chosen[-before:], columns.device)]


def index_of(places: Sequence[int], device: torch.device) -> Any:
    """Places as an index; on a GPU sent without waiting for it."""
    if device.type != "cuda":
        return list(places)
    host = torch.zeros(len(places), dtype=torch.int64, pin_memory=True)
    host.numpy()[:] = places
    return host.to(device, non_blocking=True)
