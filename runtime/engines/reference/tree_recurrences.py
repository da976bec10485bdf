"""Computes short convolutions and recurrences over all rows of draft trees at once, in closed form.

In a chunked recurrence, each token of a chunk reads the tokens before it. Over a tree, each row reads its ancestors
instead, with the decay in between. Rows follow their parents, so the system to solve is triangular as for a chunk.
States aren't computed per row; they are updated only when a path is committed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch.nn.functional import silu

from hdtool.runtime.caches.accepted_path_moves import select_rows
from hdtool.runtime.caches.recurrent_states import CONV, RECURRENT, StateName, StateNames, States
from hdtool.runtime.engines.reference.tree_indices import TreeIndices


class Columns(NamedTuple):
    """Inputs of a convolution over trees; a leading dimension may stack layers."""

    columns: torch.Tensor
    """Columns of the state, followed by those of the rows, shape ``[..., slots, columns, channels]``."""

    def write(self, slot: int, rows: Sequence[int], state: torch.Tensor) -> None:
        """Update a state ``[..., channels, columns]`` in place to the state after ``rows``, a path in a slot's tree."""
        before = state.shape[-1]
        last = [*range(before), *(before + row for row in rows)][-before:]
        state.copy_(select_rows(self.columns.select(-3, slot), last, -2).mT)


class Updates(NamedTuple):
    """Outer products that a tree's rows add to the state of a recurrence; a leading dimension may stack layers."""

    left: torch.Tensor
    """Shape ``[..., slots, heads, rows, width]``."""
    right: torch.Tensor
    """Shape ``[..., slots, heads or groups, rows, width]``; all heads of a group have the same."""
    decay: torch.Tensor
    """Logarithm of the decay from the state to each row, shape ``[..., slots, heads, rows, width or 1]``."""

    def write(self, slot: int, rows: Sequence[int], state: torch.Tensor) -> None:
        """Update a state ``[..., heads, ...]`` in place to the state after ``rows``, a path in a slot's tree."""
        left, right, decay = (select_rows(tensor.select(-4, slot), rows, -2) for tensor in self)
        added = left * (decay[..., -1:, :] - decay).exp()
        if (shared := left.shape[-3] // right.shape[-3]) > 1:
            right = right.repeat_interleave(shared, -3)
        _decay_and_add(state, decay[..., -1, :].exp()[..., None], added, right)


def _decay_and_add(state: torch.Tensor, decay: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """In place, multiply a state by its decay and add each row's outer product of ``left`` and ``right``."""
    left = left.transpose(-1, -2)
    if state.dim() == 3 and state.dtype == left.dtype:
        state.mul_(decay).baddbmm_(left, right)  # allocates no temporary of the state's size
    else:
        state.copy_(torch.addcmul(left @ right, state.float(), decay))


def convolve(
    indices: TreeIndices, columns: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, activates: bool
) -> torch.Tensor:
    """Apply a short convolution to ``columns``, then SiLU if ``activates``; return ``[slots, rows, channels]``.

    ``columns`` are those of the state, followed by those of the rows, ``[slots, columns, channels]``.
    """
    slots, width, channels = columns.shape
    rows = indices.rows
    window = indices.window(width - rows, weight.shape[-1])
    places = window.flatten(1)[..., None].expand(-1, -1, channels)
    read = columns.gather(1, places).view(slots, rows, -1, channels)
    out = (read.float() * weight.float().T).sum(2)
    if bias is not None:
        out = out + bias.float()
    out = out.to(weight.dtype)
    return (silu(out) if activates else out).to(columns.dtype)


def delta_rule(
    indices: TreeIndices,
    state: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
) -> tuple[torch.Tensor, Updates]:
    """Apply the gated delta rule; return its output ``[slots, rows, heads, width]`` and the rows' state updates.

    This function normalizes queries and keys. ``g`` is the logarithm of the decay per head, or per key channel (Kimi's
    delta attention), and ``beta`` the write strength.
    """
    dtype, groups = query.dtype, value.shape[2] // key.shape[2]
    q, k, v, gate, strength = (tensor.transpose(1, 2).float() for tensor in (query, key, value, g, beta))
    q, k = (tensor * (tensor.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for tensor in (q, k))
    q = q * q.shape[-1] ** -0.5
    if groups > 1:
        q, k = q.repeat_interleave(groups, 1), k.repeat_interleave(groups, 1)
    per_channel = gate.dim() == 4
    total = indices.sums[:, None] @ (gate if per_channel else gate[..., None])
    strong = k * strength[..., None]
    if per_channel:
        between = (total[:, :, :, None] - total[:, :, None]).masked_fill(indices.hidden[..., None], -torch.inf).exp()
        weighted = between * k[:, :, None]
        system, scores = (torch.einsum("bhic,bhijc->bhij", tensor, weighted) for tensor in (strong, q))
    else:
        between = (total - total.transpose(2, 3)).masked_fill(indices.hidden, -torch.inf).exp()
        system, scores = ((tensor @ k.transpose(2, 3)) * between for tensor in (strong, q))
    since = total.exp()
    held, read = (torch.cat([strong * since, q * since], 2) @ state.float()).split(q.shape[2], 2)
    right = v * strength[..., None] - held
    written = right
    if indices.rows > 1:
        written = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    out = (read + scores @ written).transpose(1, 2).contiguous().to(dtype)
    return out, Updates(k, written, total)


def scan(
    indices: TreeIndices,
    state: torch.Tensor,
    hidden: torch.Tensor,
    dt: torch.Tensor,
    decay_rate: torch.Tensor,
    keys: torch.Tensor,
    queries: torch.Tensor,
    skip: torch.Tensor,
) -> tuple[torch.Tensor, Updates]:
    """Apply the Mamba-2 scan; return its output ``[slots, rows, heads, width]`` and the rows' state updates."""
    heads, groups = hidden.shape[2], keys.shape[2]
    x = hidden.transpose(1, 2).float()
    step = dt.transpose(1, 2).float()
    b, c = (tensor.transpose(1, 2).float() for tensor in (keys, queries))
    total = indices.sums[:, None] @ (step * decay_rate.float()[:, None])[..., None]
    between = (total - total.transpose(2, 3)).masked_fill(indices.hidden, -torch.inf).exp()
    scores = (c @ b.transpose(2, 3)).repeat_interleave(heads // groups, 1) * between
    written = x * step[..., None]
    of_heads = c.repeat_interleave(heads // groups, 1) * total.exp()
    out = scores @ written + of_heads @ state.float().transpose(2, 3) + skip.float()[:, None, None] * x
    out = out.transpose(1, 2).to(hidden.dtype, memory_format=torch.contiguous_format)
    return out, Updates(written, b, total)


Changes = Columns | Updates


class MixerStates:
    """The states of one mixer before a pass, and what the rows of the pass's trees change in them."""

    def __init__(self, before: dict[StateName, torch.Tensor], indices: TreeIndices) -> None:
        self._before, self.indices = {name.kind: (name, state) for name, state in before.items()}, indices
        self.changes: dict[StateName, Changes] = {}

    @property
    def convolution(self) -> torch.Tensor:
        """The last inputs of the short convolution, ``[slots, channels, columns]``."""
        return self._before[CONV][1]

    @property
    def recurrence(self) -> torch.Tensor:
        """The state of the recurrence, ``[slots, heads, ...]``."""
        return self._before[RECURRENT][1]

    def keep_columns(self, columns: torch.Tensor) -> None:
        self.changes[self._before[CONV][0]] = Columns(columns)

    def keep_updates(self, updates: Updates) -> None:
        self.changes[self._before[RECURRENT][0]] = updates

    def commit(self, slot: int, rows: Sequence[int], states: States) -> None:
        for name, change in self.changes.items():
            change.write(slot, rows, states.tensors[name][0])


Write = Callable[[Changes, int, Sequence[int], torch.Tensor], None]
"""Updates a state in place to that after some rows, a path in a slot's tree, given what the rows change."""


class StackedStates:
    """What rows change in the states of all mixers, stacked by shape so that a GPU runs few, large operations."""

    def __init__(self, layers: Sequence[MixerStates], states: States, write: Write) -> None:
        """``write`` updates states, whose leading dimension stacks layers."""
        self._write = write
        changes = {name: change for layer in layers for name, change in layer.changes.items()}
        self._changes: dict[StateNames, Changes] = {
            names: type(changes[names[0]])(*map(torch.stack, zip(*(changes[name] for name in names), strict=True)))
            for names in states.stacks
        }

    @torch.inference_mode()
    def commit(self, slot: int, rows: Sequence[int], states: States) -> None:
        for names, change in self._changes.items():
            self._write(change, slot, rows, states.stacks[names][:, 0])
