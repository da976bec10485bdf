"""Linear layers whose packed weights are multiplied by input rows in 8 bits, whatever the number of rows."""

from __future__ import annotations

from typing import cast

import torch
from torch.nn import Module

from hdtool.runtime.kernels.compact_weight import CompactWeight, is_compact, is_packed
from hdtool.runtime.kernels.int8.panels import Panels
from hdtool.runtime.kernels.memory.output_memory import OutputMemory
from hdtool.runtime.kernels.packed.matrix import PackedMatrix
from hdtool.runtime.kernels.product_address import int8_product_of
from hdtool.runtime.kernels.small_batch_linear import ProductChoice, SmallBatchLinear, multiply


class OwnProduct(ProductChoice):
    """Our own product for any number of rows, so that a row has the same bits in every pass."""

    def __init__(self) -> None:
        super().__init__(0, fixed=True)


class Int8Linear(SmallBatchLinear):
    """A linear layer with packed weights and their panels."""

    panels: Panels
    source: PackedMatrix
    """What the panels were made from; a layer with another weight does not use them."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        input = input.contiguous()
        if not self._uses_panels() or not self.takes(input):
            return super().forward(input)
        return int8_linear(input, self.panels, self.bias, self.memory)

    def compiled_product(self) -> tuple[int, int]:
        if not self._uses_panels():
            return super().compiled_product()
        return int8_product_of(self.panels.format.kind).address, self.panels.data_ptr()

    def _uses_panels(self) -> bool:
        return is_compact(self.weight) and self.weight.stored is self.source


def use_int8_activations(model: Module) -> bool:
    """Multiply packed weights by activations in 8 bits from now on; whether the model has any.

    Layers with other weights, such as an output layer that is not quantized, keep activations in float32.
    """
    layers = [module for module in model.modules() if type(module) is SmallBatchLinear]
    found = [layer for layer in layers if is_packed(layer.weight)]
    made: dict[int, Panels] = {}
    for layer in layers if found else []:
        layer.choice = OwnProduct()
    for layer in found:
        source = cast(PackedMatrix, cast(CompactWeight, layer.weight).stored)
        if id(source) not in made:
            made[id(source)] = Panels(source.blocks, source.format)
            source.page_out()
        layer.__class__ = Int8Linear
        quantized = cast(Int8Linear, layer)
        quantized.panels, quantized.source = made[id(source)], source
    return bool(found)


def has_int8_activations(model: Module) -> bool:
    return any(isinstance(module, Int8Linear) for module in model.modules())


def int8_linear(
    input: torch.Tensor, panels: Panels, bias: torch.Tensor | None = None, memory: OutputMemory | None = None
) -> torch.Tensor:
    """As ``torch.nn.functional.linear``, for a contiguous float32 tensor on a CPU."""
    product = int8_product_of(panels.format.kind).address
    return multiply(product, panels.data_ptr(), panels.shape, input, bias, memory)
