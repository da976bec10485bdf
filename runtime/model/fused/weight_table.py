"""The addresses, compiled products and shapes of the weights of decoder layers, as compiled code reads them."""

from __future__ import annotations

from typing import Any

import numpy as np

from hdtool.runtime.kernels.compact_weight import is_compact
from hdtool.runtime.kernels.fused import layers as compiled
from hdtool.runtime.kernels.fused.layers import FIELDS, PRODUCT_FIELDS, Numbers
from hdtool.runtime.model.fused.layer_parts import LayerParts


def _address_of(weight: Any) -> int:
    return int((weight.stored if is_compact(weight) else weight).data_ptr())


def table_of(parts: list[LayerParts]) -> Numbers:
    """The addresses and shapes of all weights, a row for each layer."""
    table = np.zeros((len(parts), FIELDS), np.int64)
    for row, part in zip(table, parts, strict=True):
        for number, product in enumerate(part.products):
            bias = 0 if product.bias is None else product.bias.data_ptr()
            described = *product.compiled_product(), *product.weight.shape, bias
            row[number * PRODUCT_FIELDS : (number + 1) * PRODUCT_FIELDS] = described
        norms = [_address_of(norm._parameters["weight"]) for norm in part.norms]
        row[compiled.NORM_BEFORE : compiled.NORM_BEFORE + len(norms)] = norms
    return table
