"""Decides whether compiled passes support a model, and lists the matmuls in a model's layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch.nn import Embedding, Linear, Module

from hdtool.runtime.kernels.compact_weight import CompactEmbedding, Stored, stored_of
from hdtool.runtime.kernels.int8_dot_products import PANEL_ROWS
from hdtool.runtime.kernels.linear_layers import CompiledLinear, fits_compiled_matmul, is_readable
from hdtool.runtime.kernels.matmul import COLUMN_MULTIPLE
from hdtool.runtime.kernels.mixture_of_experts import GATE_UP, CompiledExperts, weight_names
from hdtool.runtime.kernels.packed_matrix import PackedExperts, PackedMatrix
from hdtool.runtime.kernels.row_operations import ACTIVATIONS as COMPILED_ACTIVATIONS
from hdtool.runtime.kernels.vector_code import LANES
from hdtool.runtime.model.transformers_internals import empty_model
from hdtool.runtime.program.hybrid_families import DESCRIBED
from hdtool.runtime.program.llama_like_families import Family, is_of_package, package_of
from hdtool.runtime.program.mixer_parts import router_of
from hdtool.runtime.program.model_parts import EngineSupport, LayerParts, ModelParts, model_parts
from hdtool.runtime.program.side_block import PROJECTIONS

CompiledParts: TypeAlias = ModelParts[CompiledLinear]


def _is_linear(module: Any) -> bool:
    is_compiled = type(module) is CompiledLinear and "forward" not in vars(module)
    return is_compiled and fits_compiled_matmul(module) and len(module.weight) == module.out_features


def _is_embedding(module: Module) -> bool:
    weight: Any = module._parameters.get("weight")
    return (
        (type(module) in (Embedding, CompactEmbedding) or scale_of(module) is not None)
        and cast(Embedding, module).max_norm is None
        and weight.dtype == torch.float32
        and weight.is_contiguous()
    )


def scale_of(embedding: Module) -> float | None:
    """Return the factor by which a Transformers embedding scales its rows; None for an embedding that doesn't."""
    if not (type(embedding).__name__.endswith("ScaledWordEmbedding") and package_of(embedding)):
        return None
    scale = embedding._buffers.get("embed_scale")
    return None if scale is None or scale.numel() != 1 else float(scale)


COMPILED: EngineSupport[CompiledLinear] = EngineSupport(_is_linear, is_readable, _is_embedding, LANES, DESCRIBED)
ACTIVATIONS = {gated: COMPILED_ACTIVATIONS.keys() - {"relu2" if gated else "silu"} for gated in (True, False)}
"""Activations with compiled code, for MLPs with a gate (True) and without one (False)."""


class MatmulRows(NamedTuple):
    """One matmul of a decoder layer: all rows of a linear layer, or some rows of a joined matrix."""

    layer: CompiledLinear
    first: int
    end: int

    @classmethod
    def whole(cls, layer: CompiledLinear) -> MatmulRows:
        return cls(layer, 0, layer.out_features)

    @property
    def stored(self) -> Stored:
        """The rows in the weight's storage format."""
        stored = stored_of(self.layer.weight)
        return stored if len(stored) == self.end - self.first else stored[self.first : self.end]


MIXER_INPUTS = ("inputs", "delta.gates", "delta.strengths", "delta.steps", "delta.keys", "delta.values")
"""Fields of a mixer's record for the input matmuls, except in a delta attention or with inputs grouped by key head."""
GROUPED_INPUTS = ("inputs", "delta.strengths")
DELTA_ATTENTION_INPUTS = ("inputs", "delta.keys", "delta.values", "delta.strengths")
GATES, DECAYS = ("delta.gate_input", "delta.gates"), ("delta.decay_input", "delta.steps")
"""Fields for the matmuls of a delta attention's gates and decays; a single matmul uses the second field."""
FIELDS = {
    **{name: f"attention.{name}" for name in ("queries", "keys", "values", "out")},
    "first": "mixer.inputs",
    "mixer_out": "mixer.out",
}
"""Fields, in a layer's record, of the matmuls to which ``LayerKind.factors`` gives other names."""


def matmuls_of(part: LayerParts[CompiledLinear]) -> dict[str, MatmulRows]:
    """Return a decoder layer's matmuls by their field in the layer's record, such as ``mixer.out``."""
    keys, inner = part.heads * part.width, part.inner
    sizes = keys * part.groups, keys, keys
    inputs = _split(part.qkv, sizes if part.kv_source is None else sizes[:1])
    names: tuple[str, ...] = ("queries", "keys", "values")
    if part.latent:
        names = ("latents.queries" if part.latent.queries else "queries", "keys")
        names += ("latents.gate",) if part.latent.gate else ()
        names += ("queries",) if part.latent.queries else ()
        inputs = [*inputs, *map(MatmulRows.whole, part.latent.queries)]
    dense = [*zip(("gate", "up"), _split(part.gate_up, (inner, inner)), strict=False)]
    dense += [("down", MatmulRows.whole(down)) for down in part.down]
    matmuls = {f"attention.{name}": rows for name, rows in zip(names, inputs, strict=False)}
    if part.out:
        matmuls["attention.out"] = MatmulRows.whole(part.out)
    if part.mixer:
        mixer = part.mixer
        fields = DELTA_ATTENTION_INPUTS if mixer.decay else MIXER_INPUTS[: len(mixer.inputs)]
        fields = GROUPED_INPUTS if len(fields) == len(GROUPED_INPUTS) else fields
        chains = (fields, mixer.inputs), (GATES, mixer.gate), (DECAYS, mixer.decay_inputs), (("out",), [mixer.out])
        for names, chain in chains:
            named = zip(names[len(names) - len(chain) :], map(MatmulRows.whole, chain), strict=True)
            matmuls |= {f"mixer.{name}": rows for name, rows in named}
    matmuls |= dict(zip(("input_gate", "input_out"), map(MatmulRows.whole, part.input_matmuls), strict=False))
    if part.side:
        matmuls["side_out"] = MatmulRows.whole(part.side.out)
    return matmuls | dict(dense)


def adapters_of(part: LayerParts[CompiledLinear]) -> dict[str, tuple[MatmulRows, MatmulRows]]:
    """Return both matmuls of each adapter in a layer, by the field of the matmul to whose output the adapter adds."""
    adapters = dict[str, tuple[MatmulRows, MatmulRows]]()
    for name, (first, second) in part.side.adapters.items() if part.side else ():
        fields = (name,) if name in PROJECTIONS else ("gate", "up")[: second.out_features // part.inner]
        parts = _split([second], [second.out_features // len(fields)] * len(fields))
        adapters |= {field: (MatmulRows.whole(first), rows) for field, rows in zip(fields, parts, strict=True)}
    return adapters


def has_compiled_experts(part: LayerParts[CompiledLinear], family: Family) -> bool:
    """Return True if compiled code can compute a layer's router and experts, or if the layer has no experts."""
    block: Any = part.experts
    if part.added_mixture:
        return type(part.added_mixture.experts) is CompiledExperts
    if block is None:
        return True
    if family.experts is None or type(block._modules.get("experts")) is not CompiledExperts:
        return False
    router, package = router_of(block, family.experts), package_of(part.layer)
    return (
        router is not None
        and all(is_of_package(module, package) for module in (block, block.get_submodule(family.experts.gate)))
        and router.weight.shape[1] == part.hidden
        and all(is_readable(weight) for weight in (router.weight, router.bias, router.correction) if weight is not None)
    )


def packed_experts(part: LayerParts[CompiledLinear]) -> Iterator[PackedMatrix]:
    """Yield a layer's packed expert matrices, except those in which an expert's rows don't fill whole panels."""
    experts: Any = (
        part.added_mixture.experts if part.added_mixture else cast(Any, part.experts).experts if part.experts else None
    )
    for name in weight_names(experts) if experts else ():
        stored = stored_of(getattr(experts, name))
        if not isinstance(stored, PackedExperts):
            continue
        rows = [len(part_) // len(stored) for part_ in stored.parts]
        # If one matrix holds gate and up, each half is a separate matmul.
        halves = 2 if name == GATE_UP and len(rows) == 1 else 1
        if all(number % (halves * PANEL_ROWS) == 0 for number in rows):
            yield from stored.parts


def _split(layers: Sequence[CompiledLinear], sizes: Sequence[int]) -> list[MatmulRows]:
    """Return one matmul per layer, or split a single layer that joins several into blocks of ``sizes`` rows.

    Blocks beyond the layer's last row are left out.
    """
    if len(layers) > 1 or len(sizes) == 1 or not any(sizes):
        return list(map(MatmulRows.whole, layers))
    (joined,) = layers
    ends = zip(sizes, accumulate(sizes), strict=True)
    return [MatmulRows(joined, end - size, end) for size, end in ends if end <= joined.out_features]


def _may_be_linear(module: Any) -> bool:
    return type(module) is Linear and module.in_features % COLUMN_MULTIPLE == 0


def _may_be_embedding(module: Module) -> bool:
    return (type(module) is Embedding or scale_of(module) is not None) and cast(Embedding, module).max_norm is None


OUTLINE = cast(
    Any, replace(COMPILED, is_linear=_may_be_linear, is_readable=lambda weight: True, is_embedding=_may_be_embedding)
)
"""Variant of ``COMPILED`` for modules whose weights aren't loaded yet."""


def may_be_compiled(settings: Any) -> bool:
    """Return True if the engine supports the modules that Transformers builds from this configuration.

    Also return True if the modules can't be built from the configuration. When the model is loaded, ``compile_cpu``
    decides by comparing results with Transformers'.
    """
    try:
        return model_parts(empty_model(settings), OUTLINE) is not None
    except Exception:  # from Transformers or accelerate; loading the model will report it
        return True
