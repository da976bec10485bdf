"""Computes recurrences over all rows of a tree at once, in closed form.

In a chunked recurrence, each token of a chunk reads the tokens before it. Over a tree, each row reads its ancestors
instead, with the decay in between. Rows follow their parents, so the system to solve is triangular as for a chunk. No
state is computed for each row: only committing a path updates the states.

In a copy of the mixer's ``forward``, the modeling module's functions for convolutions and recurrences are replaced. The
modeling module itself is not changed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch.nn.functional import silu, softplus as softplus_of
from transformers.activations import ACT2FN

from hdtool.runtime.caches.states import CONV, Names, StateLayer, StateName, States
from hdtool.runtime.engines.stock.mixers import Mixer, TreeIndices, has_own_forward

NO_TENSOR = torch.empty(0)
"""Returned in place of the last state, which is not computed for trees."""


class DeltaRows(NamedTuple):
    """Updates that a tree's rows make to the state of a gated delta rule; a leading dimension may stack layers."""

    keys: torch.Tensor
    """Shape ``[..., slots, heads, rows, width]``."""
    values: torch.Tensor
    """Value that each row adds for its key, shape ``[..., slots, heads, rows, width]``."""
    decay: torch.Tensor
    """Logarithm of the decay from the state to each row, shape ``[..., slots, heads, rows, width or 1]``."""

    def write(self, slot: int, rows: Any, state: torch.Tensor) -> None:
        """Update a state ``[..., heads, ...]`` in place to the state after ``rows``, a path in a slot's tree."""
        keys, values, decay = (tensor.select(-4, slot)[..., rows, :] for tensor in self)
        written = keys * (decay[..., -1:, :] - decay).exp()
        _decay_and_add(state, decay[..., -1, :].exp()[..., None], written, values)


class ScanRows(NamedTuple):
    """Updates that a tree's rows make to the state of a Mamba-2 scan; a leading dimension may stack layers."""

    inputs: torch.Tensor
    """Shape ``[..., slots, heads, rows, width]``."""
    keys: torch.Tensor
    """Shape ``[..., slots, groups, rows, states]``."""
    decay: torch.Tensor
    """Logarithm of the decay from the state to each row, shape ``[..., slots, heads, rows, 1]``."""

    def write(self, slot: int, rows: Any, state: torch.Tensor) -> None:
        inputs, keys, decay = (tensor.select(-4, slot)[..., rows, :] for tensor in self)
        written = inputs * (decay[..., -1:, :] - decay).exp()
        keys = keys.repeat_interleave(inputs.shape[-3] // keys.shape[-3], -3)
        _decay_and_add(state, decay[..., -1, :].exp()[..., None], written, keys)


def _decay_and_add(state: torch.Tensor, decay: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """In place, multiply a state by its decay and add each row's outer product of ``left`` and ``right``."""
    left = left.transpose(-1, -2)
    if state.dim() == 3 and state.dtype == left.dtype:
        state.mul_(decay).baddbmm_(left, right)  # allocates no temporary of the state's size
    else:
        state.copy_(torch.addcmul(left @ right, state.float(), decay))


def convolve(
    indices: TreeIndices,
    columns: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
) -> torch.Tensor:
    """Apply a short convolution to ``columns``; return ``[slots, channels, rows]``.

    ``columns`` are those of the state, followed by those of the rows.
    """
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
    """Apply the gated delta rule; return its output ``[slots, rows, heads, width]`` and the rows' state updates.

    ``g`` is the logarithm of the decay per head, or per key channel (Kimi's delta attention).
    """
    dtype, groups = query.dtype, value.shape[2] // key.shape[2]
    q, k, v, gate, strength = (tensor.transpose(1, 2).float() for tensor in (query, key, value, g, beta))
    if normalized:
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
    out = scores @ written + of_heads @ state.float().transpose(2, 3)
    if skip is not None:
        out = out + skip.float()[:, None, None] * x
    return out.transpose(1, 2).contiguous(), ScanRows(written, b, total)


def time_step(dt: torch.Tensor, bias: torch.Tensor | None, *, softplus: bool) -> torch.Tensor:
    """Return the time step of a scan as decoding computes it, without clamping."""
    dt = dt if bias is None else dt + bias.to(dt.dtype)
    return softplus_of(dt) if softplus else dt


def last_columns(columns: torch.Tensor, slot: int, rows: Sequence[int], before: int) -> torch.Tensor:
    """Return a convolution's state after a path of rows: the last ``before`` columns, ``[..., channels, before]``."""
    chosen = [*range(before), *(before + row for row in rows)]
    return columns.select(-3, slot)[..., index_of(chosen[-before:], columns.device)]


def index_of(places: Sequence[int], device: torch.device) -> Any:
    """Return indices in a form that can index a tensor on ``device``; copying them to a GPU doesn't block."""
    if device.type != "cuda":
        return list(places)
    host = torch.zeros(len(places), dtype=torch.int64, pin_memory=True)
    host.numpy()[:] = places
    return host.to(device, non_blocking=True)


CONVOLUTION, CONVOLUTION_OF_ONE = "causal_conv1d_fn", "causal_conv1d_update"
DELTA_RULES = ("torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention")
DELTA_RULES_OF_ONE = ("torch_recurrent_gated_delta_rule", "recurrent_kimi_delta_attention")
SCAN, SCAN_OF_ONE = "mamba2_chunk_scan", "mamba2_selective_state_update"
MIXES = {*DELTA_RULES, SCAN}
MIXES_ONE = {*DELTA_RULES_OF_ONE, SCAN_OF_ONE, "selective_state_update"}


class ClosedStates:
    """Records the updates that rows make to the states of one layer, and the columns that its convolutions read."""

    def __init__(self, before: dict[StateName, torch.Tensor], indices: TreeIndices) -> None:
        self.before, self.indices = before, indices
        self.columns: dict[StateName, torch.Tensor] = {}
        self.rows: dict[StateName, DeltaRows | ScanRows] = {}

    def named(self, state: torch.Tensor) -> StateName:
        return next(name for name, tensor in self.before.items() if tensor is state)

    def commit(self, slot: int, rows: Sequence[int], states: States) -> None:
        for name, columns in self.columns.items():
            into = states.tensors[name][0]
            into.copy_(last_columns(columns, slot, rows, into.shape[-1]))
        for name, written in self.rows.items():
            written.write(slot, list(rows), states.tensors[name][0])


class StackedStates:
    """State updates stacked over all layers with equal state shapes, so that a GPU runs few, large operations."""

    def __init__(self, layers: Sequence[ClosedStates], states: States) -> None:
        columns = {name: tensors for layer in layers for name, tensors in layer.columns.items()}
        rows = {name: tensors for layer in layers for name, tensors in layer.rows.items()}
        self._columns = {
            names: torch.stack([columns[name] for name in names]) for names in states.stacks if names[0] in columns
        }
        self._rows: dict[Names, DeltaRows | ScanRows] = {
            names: type(rows[names[0]])(*map(torch.stack, zip(*(rows[name] for name in names), strict=True)))
            for names in states.stacks
            if names[0] in rows
        }

    @torch.inference_mode()
    def commit(self, slot: int, rows: Sequence[int], states: States) -> None:
        for names, columns in self._columns.items():
            into = states.stacks[names][:, 0]
            into.copy_(last_columns(columns, slot, rows, into.shape[-1]))
        if self._rows:
            index = index_of(rows, next(iter(self._rows.values())).decay.device)
            for names, written in self._rows.items():
                written.write(slot, index, states.stacks[names][:, 0])


class _TreeLayer(StateLayer):
    """A cache layer that leaves its states unchanged and records convolution columns separately."""

    def __init__(self, layer: int, states: ClosedStates) -> None:
        super().__init__(states.before, has_begun=True)
        self.record_past = True  # so that a single row takes the multi-token branch as well
        self._layer, self._states = layer, states

    def update_conv_state(
        self, conv_states: torch.Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
    ) -> torch.Tensor:
        state = self.conv_states[state_idx]
        assert state is not None
        columns = torch.cat([state, conv_states.to(state.dtype)], -1)
        self._states.columns[StateName(self._layer, CONV, state_idx)] = columns
        return columns

    def update_recurrent_state(self, recurrent_states: torch.Tensor, state_idx: int = 0, **_: Any) -> torch.Tensor:
        return recurrent_states


class UnknownRecurrenceError(Exception):
    """Raised if a mixer updates a state with a function that has no closed form."""


class ClosedForm:
    """A copy of a mixer's ``forward`` that computes recurrences and convolutions over trees in closed form."""

    def __init__(self, mixer: Mixer, forward: FunctionType) -> None:
        self._mixer = mixer
        self._states: ClosedStates
        replaced: dict[str, Callable[..., Any]] = {
            CONVOLUTION: self._convolve,
            CONVOLUTION_OF_ONE: self._convolve_one,
            SCAN: self._scan,
            SCAN_OF_ONE: self._scan_one,
            **dict.fromkeys([*DELTA_RULES, *DELTA_RULES_OF_ONE], self._delta_rule),
        }
        names = {**forward.__globals__, **replaced}
        copied = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
        copied.__kwdefaults__ = forward.__kwdefaults__
        self._forward = MethodType(copied, mixer.module)

    @classmethod
    def of(cls, mixer: Mixer) -> ClosedForm | None:
        """Return a mixer's closed form, or None if its ``forward`` was replaced or doesn't call the known functions.

        The caller must check the results of the closed form.
        """
        module = mixer.module
        if has_own_forward(module) or any(hasattr(part, "_hf_hook") for part in module.modules()):
            return None
        forward = inspect.unwrap(type(module).forward)
        called = set(forward.__code__.co_names)
        is_known = CONVOLUTION in called and len(called & MIXES) == len(called & MIXES_ONE)
        return cls(mixer, forward) if is_known and isinstance(forward, FunctionType) else None

    def __call__(self, cache: Any, states: ClosedStates, args: Any, kwargs: Any) -> Any:
        self._states = states
        layer = self._mixer.layer
        held = cache.layers[layer]
        cache.layers[layer] = _TreeLayer(layer, states)
        try:
            output = self._forward(*args, **{name: None if name.endswith("mask") else kwargs[name] for name in kwargs})
        finally:
            cache.layers[layer] = held
            del self._states  # they hold views of a cache that may be freed before the next pass
        if unknown := states.before.keys() - states.columns.keys() - states.rows.keys():
            raise UnknownRecurrenceError(f"{type(self._mixer.module).__name__} updates {unknown} in another way")
        return output

    def _convolve(
        self,
        hidden_states: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        **_: Any,
    ) -> torch.Tensor:
        return convolve(self._states.indices, hidden_states, weight, bias, activation)

    def _convolve_one(
        self,
        hidden_states: torch.Tensor,
        conv_state: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
    ) -> torch.Tensor:
        columns = torch.cat([conv_state, hidden_states.to(conv_state.dtype)], -1)
        self._states.columns[self._states.named(conv_state)] = columns
        return self._convolve(columns, weight, bias, activation)

    def _delta_rule(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        initial_state: torch.Tensor,
        use_qk_l2norm_in_kernel: bool = False,
        **_: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        output, rows = delta_rule(
            self._states.indices, query, key, value, g, beta, initial_state, normalized=use_qk_l2norm_in_kernel
        )
        self._states.rows[self._states.named(initial_state)] = rows
        return output, NO_TENSOR

    def _scan(
        self,
        hidden_states: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,  # noqa: N803 - the library's name
        B: torch.Tensor,  # noqa: N803
        C: torch.Tensor,  # noqa: N803
        *,
        initial_states: torch.Tensor,
        D: torch.Tensor | None = None,  # noqa: N803
        dt_bias: torch.Tensor | None = None,
        dt_softplus: bool = False,
        **_: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        step = time_step(dt, dt_bias, softplus=dt_softplus)
        output, rows = scan(self._states.indices, hidden_states, step, A, B, C, initial_states, D)
        self._states.rows[self._states.named(initial_states)] = rows
        return output, NO_TENSOR

    def _scan_one(
        self,
        state: torch.Tensor,
        hidden_states: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,  # noqa: N803
        B: torch.Tensor,  # noqa: N803
        C: torch.Tensor,  # noqa: N803
        D: torch.Tensor | None = None,  # noqa: N803
        z: torch.Tensor | None = None,
        dt_bias: torch.Tensor | None = None,
        dt_softplus: bool = False,
        **_: Any,
    ) -> torch.Tensor:
        output, _none = self._scan(
            hidden_states[:, None],
            dt[:, None, :, 0],
            A[:, 0, 0],
            B[:, None],
            C[:, None],
            initial_states=state,
            D=None if D is None else D[:, 0],
            dt_bias=None if dt_bias is None else dt_bias[:, 0],
            dt_softplus=dt_softplus,
        )
        gated = output[:, 0] if z is None else output[:, 0] * silu(z)
        return gated.to(hidden_states.dtype)
