"""Estimates the duration of forward passes with a roofline model: memory traffic and compute.

A pass reads the dense weights, the KV cache of its context, and every expert that any of its rows activates. Kernel
launches, activations and everything besides matmuls count as free.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch.nn import Module, ModuleList

from hdtool.runtime.budget.cost_curve import CostCurve
from hdtool.runtime.budget.measure_passes import MEASURED_NODES
from hdtool.runtime.model.pass_inputs import WITHOUT_MASK

TOP_NAMES = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_k", "moe_topk")
"""Names under which configurations store the number of active experts per token."""
OF_WEIGHT = 2
"""Operations per row and weight: one multiplication and one addition."""


def distinct_experts(rows: float, top: int, experts: int, overlap: float = 0.0) -> float:
    """Return the expected number of distinct experts that ``rows`` rows activate in a layer.

    Each row activates ``top`` of ``experts``. ``overlap`` is the share by which rows activate fewer additional experts
    than independent rows would.
    """
    independent: float = experts * (1 - (1 - top / experts) ** rows)
    return top + (1 - overlap) * (independent - top)


@dataclass(frozen=True)
class Mixture:
    """Experts of one layer."""

    experts: int
    top: int
    nbytes: float
    """Size of one expert's weights in bytes."""


@dataclass(frozen=True)
class Keys:
    """KV cache of one layer."""

    nbytes: int
    """Size of one token's keys and values in bytes."""
    window: int | None
    """Sliding window in tokens; None for full attention."""


@dataclass(frozen=True)
class PassReads:
    """Memory that a forward pass of a model reads."""

    shared: int
    """Size of the dense weights in bytes."""
    mixtures: tuple[Mixture, ...]
    keys: tuple[Keys, ...]
    itemsize: int
    """Bytes per weight."""

    @classmethod
    def of(cls, model: Any) -> PassReads:
        """Return what passes of ``model`` read; its tensors may be on the meta device."""
        config = model.config.get_text_config(decoder=True)
        mixtures = tuple(_mixtures(model, config))
        whole = sum(int(weight.nbytes) for weight in model.parameters())
        table, head = model.get_input_embeddings().weight, model.get_output_embeddings()
        if head is None or head.weight is not table:
            whole -= int(table.nbytes)
        shared = whole - round(sum(one.experts * one.nbytes for one in mixtures))
        return cls(shared, mixtures, tuple(_keys(config, model.dtype.itemsize)), model.dtype.itemsize)

    def weights(self, rows: int, overlap: float = 0.0) -> float:
        """Return the weight bytes that a pass over ``rows`` rows reads."""
        active_bytes = (one.nbytes * distinct_experts(rows, one.top, one.experts, overlap) for one in self.mixtures)
        return self.shared + sum(active_bytes)

    def context(self, rows: int, length: int) -> int:
        """Return the KV cache bytes that a pass over ``rows`` rows reads after ``length`` tokens."""
        return sum(one.nbytes * min(length + rows, one.window or length + rows) for one in self.keys)

    def operations(self, rows: int) -> float:
        """Return the number of multiplications and additions of a pass over ``rows`` rows."""
        return OF_WEIGHT * rows * self.weights(1) / self.itemsize


@dataclass(frozen=True)
class Roofline:
    """Memory bandwidth and compute throughput of a device."""

    bandwidth: float
    """Bytes per second."""
    operations: float | None = None
    """Multiplications and additions per second; None if passes are always memory-bound."""

    def seconds(self, reads: PassReads, rows: int, length: int, overlap: float = 0.0) -> float:
        reading = (reads.weights(rows, overlap) + reads.context(rows, length)) / self.bandwidth
        return max(reading, reads.operations(rows) / self.operations) if self.operations else reading

    def curve(
        self, reads: PassReads, lengths: Sequence[int], overlap: float = 0.0, *, model: str = "", dtype: str = ""
    ) -> CostCurve:
        """Return the cost curve of passes at these context lengths, whose last token is the root of the tree."""
        milliseconds = tuple(
            tuple(1e3 * self.seconds(reads, nodes + 1, length - 1, overlap) for nodes in MEASURED_NODES)
            for length in lengths
        )
        device = f"a device of {self.bandwidth / 1e9:g} GB/s"
        if self.operations:
            device += f" and {self.operations / 1e12:g} TFLOP/s"
        return CostCurve(MEASURED_NODES, milliseconds, tuple(lengths), f"{device} (estimate)", model, dtype)


def _mixtures(model: Any, config: Any) -> Iterator[Mixture]:
    """Yield the experts of each layer; all count as active if the configuration does not say how many are."""
    named = (getattr(config, name, None) for name in TOP_NAMES)
    top = next((value for value in named if isinstance(value, int)), None)
    for module in model.modules():
        experts = module._modules.get("experts")
        number = _number_of(experts) if experts is not None else 0
        if number:
            nbytes = sum(int(weight.nbytes) for weight in experts.parameters())
            yield Mixture(number, min(number, top or number), nbytes / number)


def _number_of(experts: Module) -> int:
    """Return the number of experts: the length of a module list, or the first dimension of stacked weights."""
    if isinstance(experts, ModuleList):
        return len(experts)
    stacked = [weight for weight in experts.parameters(recurse=False) if weight.dim() == 3]
    return len(stacked[0]) if stacked else 0


def _keys(config: Any, itemsize: int) -> Iterator[Keys]:
    """Yield the KV cache of each attention layer."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    queries = config.num_attention_heads
    heads = getattr(config, "num_key_value_heads", None) or queries
    width = getattr(config, "head_dim", None) or config.hidden_size // queries
    # In latent attention, keys are wider than values, and the configuration has both widths.
    widths = (getattr(config, name, None) or width for name in ("qk_head_dim", "v_head_dim"))
    nbytes = itemsize * heads * sum(widths)
    for kind in kinds or [None] * config.num_hidden_layers:
        if kind not in WITHOUT_MASK:
            yield Keys(nbytes, window if kind is None or "sliding" in kind else None)
