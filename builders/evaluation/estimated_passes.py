"""Estimates the duration of forward passes from memory traffic and compute, with a roofline model.

A pass reads the dense weights, the KV cache of its context, and every expert that any of its tokens activates. Compute
is that of the matmuls with weights. Kernel launches, activations and all other operations count as free.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch.nn import Module, ModuleList

from hdtool.runtime.budget.cost_curve import CostCurve
from hdtool.runtime.budget.measure_passes import MEASURED_NODES
from hdtool.runtime.model.pass_inputs import WITHOUT_MASK

TOP_K_NAMES = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_k", "moe_topk")
"""Names under which configurations store the number of active experts per token."""
OPS_PER_WEIGHT = 2
"""Operations per token and weight: one multiplication and one addition."""


def distinct_experts(rows: float, top_k: int, experts: int, overlap: float = 0.0) -> float:
    """Return the expected number of distinct experts that a pass over ``rows`` tokens activates in a layer.

    Each token activates ``top_k`` of ``experts``. ``overlap`` interpolates linearly between tokens that choose their
    experts independently (0) and tokens that all choose the same experts (1).
    """
    independent: float = experts * (1 - (1 - top_k / experts) ** rows)
    return top_k + (1 - overlap) * (independent - top_k)


@dataclass(frozen=True)
class LayerExperts:
    """Experts of one layer."""

    count: int
    top_k: int
    """Number of experts that each token activates."""
    nbytes: float
    """Size of one expert's weights in bytes."""


@dataclass(frozen=True)
class LayerKVCache:
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
    experts: tuple[LayerExperts, ...]
    kv_caches: tuple[LayerKVCache, ...]
    itemsize: int
    """Bytes per weight."""

    @classmethod
    def of(cls, model: Any) -> PassReads:
        """Return what a forward pass of ``model`` reads; the model may be on the meta device."""
        config = model.config.get_text_config(decoder=True)
        experts = tuple(_layer_experts(model, config))
        whole = sum(int(weight.nbytes) for weight in model.parameters())
        table, head = model.get_input_embeddings().weight, model.get_output_embeddings()
        if head is None or head.weight is not table:
            whole -= int(table.nbytes)
        shared = whole - round(sum(one.count * one.nbytes for one in experts))
        return cls(shared, experts, tuple(_kv_caches(config, model.dtype.itemsize)), model.dtype.itemsize)

    def weights(self, rows: int, overlap: float = 0.0) -> float:
        """Return the number of weight bytes that a pass over ``rows`` tokens reads."""
        active_bytes = (one.nbytes * distinct_experts(rows, one.top_k, one.count, overlap) for one in self.experts)
        return self.shared + sum(active_bytes)

    def context(self, rows: int, length: int) -> int:
        """Return how many KV cache bytes a pass over ``rows`` tokens reads if ``length`` tokens precede them."""
        return sum(one.nbytes * min(length + rows, one.window or length + rows) for one in self.kv_caches)

    def operations(self, rows: int) -> float:
        """Return the number of multiplications and additions of a pass over ``rows`` tokens."""
        return OPS_PER_WEIGHT * rows * self.weights(1) / self.itemsize


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
        """Return the cost curve at the given context ``lengths``, which include the root of the draft tree."""
        milliseconds = tuple(
            tuple(1e3 * self.seconds(reads, nodes + 1, length - 1, overlap) for nodes in MEASURED_NODES)
            for length in lengths
        )
        device = f"a device of {self.bandwidth / 1e9:g} GB/s"
        if self.operations:
            device += f" and {self.operations / 1e12:g} TFLOP/s"
        return CostCurve(MEASURED_NODES, milliseconds, tuple(lengths), f"{device} (estimate)", model, dtype)


def _layer_experts(model: Any, config: Any) -> Iterator[LayerExperts]:
    """Yield the experts of each layer; all count as active if the configuration does not say how many are."""
    named = (getattr(config, name, None) for name in TOP_K_NAMES)
    top_k = next((value for value in named if isinstance(value, int)), None)
    for module in model.modules():
        experts = module._modules.get("experts")
        number = _expert_count(experts) if experts is not None else 0
        if number:
            nbytes = sum(int(weight.nbytes) for weight in experts.parameters())
            yield LayerExperts(number, min(number, top_k or number), nbytes / number)


def _expert_count(experts: Module) -> int:
    """Return the number of experts: the length of a module list, or the first dimension of stacked weights, or 0."""
    if isinstance(experts, ModuleList):
        return len(experts)
    stacked = [weight for weight in experts.parameters(recurse=False) if weight.dim() == 3]
    return len(stacked[0]) if stacked else 0


def _kv_caches(config: Any, itemsize: int) -> Iterator[LayerKVCache]:
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
            yield LayerKVCache(nbytes, window if kind is None or "sliding" in kind else None)
