"""Configures quantization libraries, measures rounding, and checks or ensures that rows of a pass are independent."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Module

from hdtool.data.errors import FamilyError, ModelError, OptionError, install_command
from hdtool.data.notes import note
from hdtool.runtime.core.tolerances import HIGH_PRECISION_TOLERANCE, distances
from hdtool.runtime.kernels.linear_layers import has_plain_weight
from hdtool.runtime.model.transformers_internals import passes

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.utils.quantization_config import QuantizationConfigMixin

MXFP4 = "mxfp4"
"""Name in configurations of the scheme by which experts are stored in MXFP4 blocks."""
TORCHAO = "torchao"
LIBRARIES = {"int8": TORCHAO, "nf4": "bitsandbytes"}
"""Libraries that quantize while loading, by scheme; a quantized checkpoint names its library itself."""
MODULES = {"torchao": "torchao", "bitsandbytes": "bitsandbytes", "compressed-tensors": "compressed_tensors"}
"""Names of the modules to import, by library."""


def library_of(settings: Any) -> str:
    """Return the name of the library that quantized a checkpoint, from its configuration; empty if not quantized."""
    for part in (settings, settings.get_text_config(decoder=True)):
        config_: Any = getattr(part, "quantization_config", None)
        if config_ is not None:
            config_ = config_ if isinstance(config_, dict) else config_.to_dict()
            method = config_.get("quant_method") or "bitsandbytes"  # old checkpoints only have load_in_8bit
            return str(getattr(method, "value", method))
    return ""


def require_libraries(name: str, settings: Any, scheme: str | None) -> None:
    """Raise a ``ModelError`` if a required library is missing.

    Raise an ``OptionError`` if a quantized checkpoint would be quantized again. Call this before weights are read.
    """
    saved = library_of(settings)
    if scheme and saved:
        raise OptionError(f"{name} is quantized already, with {saved}: leave out --quantization {scheme}")
    library = LIBRARIES[scheme] if scheme else saved
    if library in MODULES and not find_spec(MODULES[library]):
        what = f"--quantization {scheme}" if scheme else f"{name}, which is quantized with {saved},"
        raise ModelError(f"{what} needs {library}, not installed here: {install_command('quantized')}")


def quantization(scheme: str, dtype: torch.dtype) -> QuantizationConfigMixin:
    """Return the configuration with which transformers quantizes a model according to ``scheme``.

    All schemes quantize only weights, so the rows of a pass stay independent.
    """
    from transformers import BitsAndBytesConfig, TorchAoConfig

    if scheme == "nf4":
        return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)
    from torchao.quantization import Int8WeightOnlyConfig

    return TorchAoConfig(Int8WeightOnlyConfig())


NEIGHBOR_SCALE = 100.0
"""Factor by which the added row is larger than the tested one in the check for row independence."""
DEPENDENCE_TOLERANCE = 1e-2
"""Maximum relative change that another row of the pass may cause in a row's output.

This is several times the rounding error of bfloat16, but less than the 1.2 to 1.9 % that shared outliers cause in
LLM.int8(), and far less than the effect of a shared scale.
"""


def parts_of(weight: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors that make up a weight: the parts of a library's tensor subclass, or the weight itself."""
    if type(weight).__module__.startswith("torch.") or not hasattr(weight, "__tensor_flatten__"):
        return [weight]
    names, _ = weight.__tensor_flatten__()
    return [getattr(weight, name) for name in names]


def quantized_layers(model: PreTrainedModel) -> dict[str, Module]:
    """Return the layers with quantized weights, by name."""
    # Some libraries store their weights under other names.
    named = "weight" if getattr(model.config, "quantization_config", None) is None else "in_features"
    return {
        name: layer
        for name, layer in model.named_modules()
        if hasattr(layer, "in_features") and hasattr(layer, named) and not has_plain_weight(layer)
    }


@torch.inference_mode()
def refuse_dependent_rows(model: PreTrainedModel, device: torch.device) -> None:
    """Raise a ``FamilyError`` if a layer's output for one row depends on other rows of the pass.

    With one activation scale per tensor, for example, a token's logits depend on the drafts in the tree.
    """
    for name, layer in quantized_layers(model).items():
        if (dependence := _dependence(layer, model.dtype, device)) > DEPENDENCE_TOLERANCE:
            raise FamilyError(
                f"models of type {model.config.model_type!r} cannot be used as this one is quantized: {name} scales "
                f"its input over all tokens of a pass, so drafts would change the answer (by {dependence:.0%} here): "
                "quantize activations row by row (torchao: granularity=PerRow()), or the weights alone"
            )


def _dependence(layer: Any, dtype: torch.dtype, device: torch.device) -> float:
    """Return the relative change of a layer's output for one row when another row is added to the pass."""
    places = [tensor.device for tensor in chain(layer.parameters(), layer.buffers())]
    place = places[0] if places and places[0].type != "meta" else device
    row = torch.cos(torch.arange(layer.in_features, device=place) * 0.7)
    row[0] = 5.0  # coarsens the quantization of the other values without being an outlier
    rows = torch.stack([row, NEIGHBOR_SCALE * row.flip(0)]).to(dtype)
    alone, with_neighbor = layer(rows[None, :1])[0, 0].double(), layer(rows[None])[0, 0].double()
    return float((with_neighbor - alone).norm() / alone.norm().clamp_min(1e-12))


@torch.inference_mode()
def measure_rounding(model: PreTrainedModel, paths: torch.Tensor, at_once: torch.Tensor) -> float:
    """Return the rounding error of a model's logits, in standard deviations of the logits; print a note if it is large.

    ``at_once`` are the logits of ``paths``, each read in one pass. Reading the paths token by token changes these
    logits only by rounding, but by more than the dtype suggests if layers quantize their input.
    """
    logits = [out.logits[:, -1] for out in passes(model, paths.split(1, dim=1))]
    rounding = distances(torch.stack(logits, dim=1), at_once).max().item()
    if rounding > HIGH_PRECISION_TOLERANCE:
        note(
            f"this model rounds its logits by {rounding:.2g} standard deviations: drafts may change "
            "the choice between two tokens as close as that; hdtool verify counts such near ties"
        )
    return rounding


class RowByRow:
    """Makes the 8-bit layers of bitsandbytes compute each row of a pass as if it were alone.

    LLM.int8() multiplies an input column in higher precision if any row of the pass has an outlier there, so drafts
    would affect the rounding of other rows. Hooks therefore remove each row's outliers before the layer and add their
    contribution to its output.
    """

    def __init__(self, model: Module) -> None:
        self.layers = [layer for layer in model.modules() if _looks_for_outliers(layer)]
        self._is_active = False
        self._outlier_rows: torch.Tensor | None = None
        self._hooks = [layer.register_forward_pre_hook(self._remove_outliers) for layer in self.layers]
        self._hooks += [layer.register_forward_hook(self._put_back) for layer in self.layers]

    @property
    def reason(self) -> str:
        """Reason why steps cannot be captured; empty if the model has no layers that look for outliers."""
        return "its 8-bit layers look for outliers in each pass" if self.layers else ""

    def release(self) -> None:
        """Remove the hooks from the model."""
        for hook in self._hooks:
            hook.remove()

    @contextmanager
    def on(self) -> Iterator[None]:
        """In this block, make layers compute each row as if it were alone; elsewhere, leave them as in ``generate``."""
        self._is_active = True
        try:
            yield
        finally:
            self._is_active = False

    def _remove_outliers(self, layer: Any, arguments: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor] | None:
        self._outlier_rows = None
        rows = arguments[0]
        if not self._is_active or rows.numel() == rows.shape[-1]:
            return None
        outliers = rows.to(torch.float16).abs() >= layer.state.threshold  # the layer's own criterion
        if not outliers.any():
            return None
        self._outlier_rows = rows.masked_fill(~outliers, 0)
        return (rows.masked_fill(outliers, 0),)

    def _put_back(self, layer: Any, arguments: tuple[torch.Tensor, ...], result: torch.Tensor) -> torch.Tensor | None:
        if self._outlier_rows is None:
            return None
        outliers, self._outlier_rows = self._outlier_rows.flatten(0, -2), None
        columns = outliers.any(dim=0).nonzero()[:, 0]
        weights = (layer.state.CB[:, columns].float() * layer.state.SCB[:, None] * (1 / 127)).to(result.dtype)
        return torch.addmm(result.flatten(0, -2), outliers[:, columns], weights.t()).view_as(result)


def _looks_for_outliers(layer: Any) -> bool:
    library = sys.modules.get("bitsandbytes")  # already imported if the model has such layers
    return library is not None and isinstance(layer, library.nn.Linear8bitLt) and layer.state.threshold > 0
