"""Maps a model's parameters to the tensors of a GGUF file, by the tables of the library gguf and of transformers.

The tables name each tensor's parameter. Tracing shows what transformers does to a tensor: it may permute rows,
transpose, join experts' projections, or change values, as in norms.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import modeling_gguf_pytorch_utils as library

from hdtool.runtime.weights.gguf_file import GGUFFile
from hdtool.runtime.weights.gguf_settings import GPT_OSS
from hdtool.runtime.weights.stored_pieces import Piece
from hdtool.runtime.weights.traced_conversions import traced
from hdtool.runtime.weights.transformers_names import stored_weights
from hdtool.runtime.weights.weight_store import StoredWeight, WeightStore


def gguf_store(file: GGUFFile, settings: Any, model: Any, *, check: bool = False) -> WeightStore:
    """Return the store of a GGUF file's weights for the parameters of ``model``, which may be on the meta device.

    With ``check``, the row order found for one tensor of each kind is compared with transformers' own result.
    """
    if transforms := _transforms(file.architecture, settings):
        return WeightStore(stored_weights(transforms, file.tensors, model), file.path)
    return WeightStore(_processed_weights(file.architecture, file.tensors, settings, model, check=check), file.path)


def _transforms(architecture: str, settings: Any) -> list[Any]:
    """Return transformers' renamings and conversions for an architecture; empty if it has a processor instead."""
    try:
        from transformers.integrations.gguf import utils
    except ImportError:  # before 5.23
        return []
    if not utils.is_gguf_arch_supported(architecture):
        return []
    return list(utils.get_gguf_conversion_mapping(architecture, settings))


class _Childless:
    """Stand-in for a model without children, so that transformers doesn't look up the names of each child again."""

    def __init__(self, model: Any) -> None:
        self.config, self.state_dict = model.config, model.state_dict

    def named_children(self) -> Iterator[tuple[str, Any]]:
        return iter(())


def _parameter_names(model: Any, processor: Any) -> dict[str, str]:
    """Return a model's parameter names, keyed by the names of GGUF tensors."""
    names: dict[str, str] = library.get_gguf_hf_weights_map(_Childless(model), processor)
    prefix, settings = model.base_model_prefix, model.config
    base = getattr(model, prefix, None)
    if base is None or {f"{prefix}.{name}" for name in base.state_dict()} <= set(names.values()):
        return names
    # Some files are of models without a head.
    inner: dict[str, str] = library.get_gguf_hf_weights_map(
        _Childless(base), processor, settings.model_type, settings.num_hidden_layers, f"{prefix}."
    )
    return {**inner, **names}


@dataclass
class _Processing:
    """Applies transformers' processor of an architecture to tensors of a GGUF file."""

    processor: Any
    names: dict[str, str]

    def made(self, tensors: Sequence[str], parts: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the parameters, by name, that the processor makes from ``parts``, the contents of these tensors."""
        made: dict[str, torch.Tensor] = {}
        for name, part in zip(tensors, parts, strict=True):
            with np.errstate(all="ignore"):  # numbers of rows have no logarithms
                result = self.processor.process(
                    weights=part.numpy(), name=name, tensor_key_mapping=self.names, parsed_parameters={"tensors": made}
                )
            name = result.name or ""
            # Some parameters are no module's weight, and have a name without this suffix.
            if target := self.names.get(name) or self.names.get(name.removesuffix(".weight")):
                made[target] = torch.from_numpy(np.ascontiguousarray(result.weights))
        return made

    def parameter(self, target: str, tensors: Sequence[str], parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return self.made(tensors, parts)[target]

    def targets(self, name: str, piece: Piece) -> Iterable[str]:
        """Return the names of the parameters to which a tensor contributes; empty if the processor rejects it."""
        number = torch.zeros((), dtype=torch.float32)
        for shape in ((*piece.shape[:-1], 1) if len(piece.shape) > 1 else piece.shape, piece.shape):
            with suppress(ValueError, IndexError):  # a processor may depend on the number of columns
                return self.made([name], [number.expand(shape)])
        return ()


def _processed_weights(
    architecture: str, pieces: Mapping[str, Piece], settings: Any, model: Any, *, check: bool
) -> dict[str, StoredWeight]:
    kind: Any = _GptOssProcessor if architecture == GPT_OSS else library.TENSOR_PROCESSORS.get(architecture)
    processor = (kind or library.TensorProcessor)(config=settings.to_dict())
    processing, parameters = _Processing(processor, _parameter_names(model, processor)), model.state_dict()
    groups: dict[str, list[str]] = {}
    for name, piece in pieces.items():
        for target in processing.targets(name, piece):
            groups.setdefault(target, []).append(name)
    first_of_kind = {re.sub(r"\d+", "", target): target for target in reversed(groups)} if check else {}
    return {
        target: traced(
            [pieces[name] for name in tensors],
            tuple(parameters[target].shape),
            partial(processing.parameter, target, tensors),
            sample=_first_columns if target in first_of_kind.values() else None,
        )
        for target, tensors in groups.items()
        if target in parameters
    }


SAMPLED_ROWS = 509
"""Maximum number of rows that are expanded for a comparison; in larger tensors, these rows are repeated."""


def _first_columns(piece: Piece) -> torch.Tensor:
    """Return the first block of each row of a tensor as the library gguf expands it; see also ``SAMPLED_ROWS``."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

    kind, is_vector = GGMLQuantizationType[piece.format], len(piece.shape) == 1
    columns, size = GGML_QUANT_SIZES[kind]
    rows, row_bytes = min(piece.rows, SAMPLED_ROWS), piece.bytes // piece.rows
    content = np.fromfile(piece.file, np.uint8, rows * row_bytes, offset=piece.offset)
    blocks = np.ascontiguousarray(content.reshape(rows, row_bytes)[:, :size])
    values = torch.from_numpy(np.resize(dequantize(blocks, kind), (piece.rows, columns)))
    return values[:, 0] if is_vector else values.view(*piece.shape[:-1], columns)


EXPERTS = re.compile(r"layers\.(?P<layer>\d+)\.mlp\.experts\.(?P<part>gate_up|down)_proj(?P<bias>_bias)?$")
EXPERT_TENSOR = re.compile(r"(?P<layer>blk\.\d+)\.ffn_(?P<part>gate|up|down)_exps\.(?P<kind>weight|bias)$")


class _GptOssProcessor(library.TensorProcessor):
    """Reads the experts of gpt-oss, whose tensors transformers expects under other names than llama.cpp writes."""

    def perform_fallback_tensor_mapping(
        self, gguf_to_hf_name_map: dict[str, str], suffix: str, qual_name: str, hf_name: str
    ) -> None:
        if match := EXPERTS.search(qual_name + hf_name):
            kind = "bias" if match["bias"] else "weight"
            for part in ("gate", "up") if match["part"] == "gate_up" else ("down",):
                gguf_to_hf_name_map[f"blk.{match['layer']}.ffn_{part}_exps.{kind}"] = qual_name + hf_name

    def process(self, weights: Any, name: str, **options: Any) -> Any:
        names, match = options["tensor_key_mapping"], EXPERT_TENSOR.match(name)
        values = weights.swapaxes(1, 2) if match and match["kind"] == "weight" else weights
        if match is None or match["part"] == "down":
            return library.GGUFTensor(values, name, {})
        made, target = options["parsed_parameters"]["tensors"], names[name]
        if target not in made:
            made[target] = torch.zeros((*values.shape[:-1], 2 * values.shape[-1]), dtype=torch.from_numpy(values).dtype)
        made[target][..., int(match["part"] == "up") :: 2] = torch.from_numpy(values)  # gate and up rows alternate
        return library.GGUFTensor(weights, "", {})
