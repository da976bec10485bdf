"""Estimated seconds of passes, by a roofline: what they read from memory, and what they compute.

A pass reads all weights that its rows share, the keys and values of its context, and the experts that any of its rows
wakes. Launches, activations and everything outside of matmuls take no time here.
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
"""What configurations call the experts of a token in a layer."""
OF_WEIGHT = 2
"""Operations of a row and a weight: one multiplication and one addition."""


def distinct_experts(rows: float, top: int, experts: int, overlap: float = 0.0) -> float:
    """The experts of a layer that some rows wake, with ``top`` of the ``experts`` each.

    ``overlap`` is the share by which they wake fewer further experts than independent rows would.
    """
    independent: float = experts * (1 - (1 - top / experts) ** rows)
    return top + (1 - overlap) * (independent - top)


@dataclass(frozen=True)
class Mixture:
    """The experts of one layer."""

    experts: int
    top: int
    nbytes: float
    """Bytes of one expert's weights."""


@dataclass(frozen=True)
class Keys:
    """The keys and values of one layer."""

    nbytes: int
    """Bytes of a token's."""
    window: int | None
    """The most tokens of a context that they are read of."""


@dataclass(frozen=True)
class PassReads:
    """What a pass of a model reads."""

    shared: int
    """Bytes of the weights that every row is multiplied by."""
    mixtures: tuple[Mixture, ...]
    keys: tuple[Keys, ...]
    itemsize: int
    """Bytes of a weight."""

    @classmethod
    def of(cls, model: Any) -> PassReads:
        """What passes of a model read, whose tensors may be without memory."""
        config = model.config.get_text_config(decoder=True)
        mixtures = tuple(_mixtures(model, config))
        whole = sum(int(weight.nbytes) for weight in model.parameters())
        table, head = model.get_input_embeddings().weight, model.get_output_embeddings()
        if head is None or head.weight is not table:
            whole -= int(table.nbytes)
        shared = whole - round(sum(one.experts * one.nbytes for one in mixtures))
        return cls(shared, mixtures, tuple(_keys(config, model.dtype.itemsize)), model.dtype.itemsize)

    def weights(self, rows: int, overlap: float = 0.0) -> float:
        """Bytes of the weights that a pass over so many rows reads."""
        woken = (one.nbytes * distinct_experts(rows, one.top, one.experts, overlap) for one in self.mixtures)
        return self.shared + sum(woken)

    def context(self, rows: int, length: int) -> int:
        """Bytes of keys and values that a pass over rows after a context reads."""
        return sum(one.nbytes * min(length + rows, one.window or length + rows) for one in self.keys)

    def operations(self, rows: int) -> float:
        """Multiplications and additions of a pass over so many rows."""
        return OF_WEIGHT * rows * self.weights(1) / self.itemsize


@dataclass(frozen=True)
class Roofline:
    """How fast a device reads and computes."""

    bandwidth: float
    """Bytes a second."""
    operations: float | None = None
    """Multiplications and additions a second; None if they never take longer than reading."""

    def seconds(self, reads: PassReads, rows: int, length: int, overlap: float = 0.0) -> float:
        reading = (reads.weights(rows, overlap) + reads.context(rows, length)) / self.bandwidth
        return max(reading, reads.operations(rows) / self.operations) if self.operations else reading

    def curve(
        self, reads: PassReads, lengths: Sequence[int], overlap: float = 0.0, *, model: str = "", dtype: str = ""
    ) -> CostCurve:
        """The cost of passes after contexts of these lengths, whose last token is the root of the tree."""
        milliseconds = tuple(
            tuple(1e3 * self.seconds(reads, nodes + 1, length - 1, overlap) for nodes in MEASURED_NODES)
            for length in lengths
        )
        device = f"a device of {self.bandwidth / 1e9:g} GB/s"
        if self.operations:
            device += f" and {self.operations / 1e12:g} TFLOP/s"
        return CostCurve(MEASURED_NODES, milliseconds, tuple(lengths), f"{device} (estimate)", model, dtype)


def _mixtures(model: Any, config: Any) -> Iterator[Mixture]:
    """The experts of each layer; those of a configuration that does not say how many a token has are all read."""
    named = (getattr(config, name, None) for name in TOP_NAMES)
    top = next((value for value in named if isinstance(value, int)), None)
    for module in model.modules():
        experts = module._modules.get("experts")
        number = _number_of(experts) if experts is not None else 0
        if number:
            nbytes = sum(int(weight.nbytes) for weight in experts.parameters())
            yield Mixture(number, min(number, top or number), nbytes / number)


def _number_of(experts: Module) -> int:
    """The number of experts: modules of a list, or the first dimension of tensors with all of them."""
    if isinstance(experts, ModuleList):
        return len(experts)
    stacked = [weight for weight in experts.parameters(recurse=False) if weight.dim() == 3]
    return len(stacked[0]) if stacked else 0


def _keys(config: Any, itemsize: int) -> Iterator[Keys]:
    """The keys and values of each layer with attention."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    queries = config.num_attention_heads
    heads = getattr(config, "num_key_value_heads", None) or queries
    width = getattr(config, "head_dim", None) or config.hidden_size // queries
    # Keys of latent attention are wider than values, and their configurations name both widths.
    widths = (getattr(config, name, None) or width for name in ("qk_head_dim", "v_head_dim"))
    nbytes = itemsize * heads * sum(widths)
    for kind in kinds or [None] * config.num_hidden_layers:
        if kind not in WITHOUT_MASK:
            yield Keys(nbytes, window if kind is None or "sliding" in kind else None)
