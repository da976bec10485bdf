"""Drafting by multi-token-prediction (MTP) layers: a single layer applied repeatedly, or several layers in turn.

No other module uses ``MtpModel`` of transformers. Checkpoints store MTP layers beside the model's other
layers; most configurations state the number of MTP layers, under different names.
"""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from hdtool.data.errors import FamilyError, HeadsError, error_reason
from hdtool.runtime.caches.kv_cache import LayerShape, layer_shapes
from hdtool.runtime.caches.slots import Cache
from hdtool.runtime.drafters.trained.draft_length import pace_for
from hdtool.runtime.drafters.trained.draft_passes import READ_CHUNK, DraftPasses, on_host
from hdtool.runtime.drafters.trained.module_parts import topk_tokens
from hdtool.runtime.drafters.trained.proposal import (
    NO_RANKING_AFTER,
    TOKENS_PER_RANKING,
    Calibration,
    Proposal,
    TrainedDrafter,
    loaded_once,
)
from hdtool.runtime.drafters.trained.sequential import BlockDrafter, Ranked, SequentialDrafter
from hdtool.runtime.engines.cuda.static_steps import extent_for
from hdtool.runtime.kernels.linear import compile_linear_layers
from hdtool.runtime.model.pass_inputs import FULL, AttentionMasks, AttentionWindow, Mask
from hdtool.runtime.model.transformers_internals import attention_of, use_masked_attention

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hdtool.runtime.target.target import Target

LAYER_COUNT_FIELDS = ("num_mtp_layers", "num_nextn_predict_layers", "mtp_num_hidden_layers")
"""Configuration fields that may hold the number of MTP layers."""
MAX_LAYERS = 8
FULL_ATTENTION = "full_attention"
INDEX_FILE, SINGLE_FILE = "model.safetensors.index.json", "model.safetensors"
OTHER_METHOD_ADVICE = "use another method, such as hd"
TRAINING_ADVICE = (
    f"train one with hdtool train-heads --kind mtp and name its folder with --heads, or {OTHER_METHOD_ADVICE}"
)


class LibraryMtp:
    """MTP layers loaded by transformers.

    Layer 0 predicts the token after the next one, and layer ``k`` the token ``k`` positions further ahead.
    """

    def __init__(self, layers: Any, width: int) -> None:
        """``width`` is the width of the model's hidden states."""
        self._layers = layers.eval().requires_grad_(False)
        self.number = int(layers.num_mtp_layers)
        self._mask: Mask = None
        # transformers would make causal masks for its own cache; draft trees need other masks.
        layers.create_masks_for_mtp_layer = lambda *_: {"attention_mask": self._mask}
        self.width = width
        self.shapes = self._shapes()
        """Shapes of the tensors that each layer caches per position."""

    @property
    def module(self) -> torch.nn.Module:
        """All MTP layers, with the parts that they share with the model."""
        return cast(torch.nn.Module, self._layers)

    @property
    def own(self) -> torch.nn.Module:
        """The MTP layers without shared parts."""
        return cast(torch.nn.Module, self._layers.layers)

    def window(self, layer: int) -> int | None:
        """Return the size of a layer's sliding window; None if the layer attends to all positions."""
        kinds = getattr(self._layers.config, "layer_types", None) or [FULL_ATTENTION] * self.number
        is_sliding = "sliding" in kinds[layer]
        return int(self._layers.config.sliding_window) if is_sliding else None

    @torch.inference_mode()
    def _shapes(self) -> list[LayerShape]:
        from transformers.cache_utils import DynamicCache

        weight = next(self.own.parameters())
        cache = DynamicCache(config=self._layers.config)
        tokens = torch.zeros((1, 2), dtype=torch.int64, device=weight.device)
        hidden, mask = weight.new_ones((1, 2, self.width)), weight.new_zeros((1, 1, 2, 2))
        for layer in range(self.number):
            self.run(layer, tokens, hidden, tokens, cache, mask)
        if any(hasattr(layer, "conv_states") for layer in cache.layers):
            raise NotImplementedError("layers that keep states")
        return layer_shapes(cache)

    def run(
        self,
        layer: int,
        tokens: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        cache: Any,
        mask: Mask,
    ) -> torch.Tensor:
        """Return a layer's state after each token, ``[1, tokens, width]``; ``hidden`` holds the state before each."""
        self._mask = mask
        return cast(torch.Tensor, self._layers.forward_layer(layer, hidden, positions, cache, input_ids=tokens))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, self._layers._project_to_logits(hidden))


class WithMtpLayers:
    """Wraps a model to give it a configuration that describes its MTP layers in the way transformers expects."""

    def __init__(self, model: PreTrainedModel, number: int) -> None:
        self._model = model
        self.config = config = copy.deepcopy(model.config)
        # A configuration saved with its model may hold the name of the dtype instead of the dtype.
        config.dtype = model.dtype
        text = config.get_text_config(decoder=True)
        text.dtype = model.dtype
        text.num_mtp_layers = number
        if getattr(text, "layer_types", None) and not getattr(text, "mtp_layer_types", None):
            text.mtp_layer_types = [_kind_of_layer(text.layer_types)] * number
        if getattr(text, "mlp_layer_types", None) and not getattr(text, "mtp_mlp_layer_types", None):
            text.mtp_mlp_layer_types = [text.mlp_layer_types[-1]] * number

        self._keys_to_ignore_on_load_unexpected = patterns_of(model)
        """Patterns by which transformers recognizes the tensors of MTP layers."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def _kind_of_layer(kinds: list[str]) -> str:
    """Return the type of a model's MTP layers, given the types of its other layers.

    This is full attention or, if none of them has that type, their last type of attention that is not linear, if any.
    """
    others = [kind for kind in kinds if "attention" in kind and "linear" not in kind]
    return FULL_ATTENTION if FULL_ATTENTION in kinds or not others else others[-1]


def mtp_layers_of(model: PreTrainedModel) -> int:
    """Return how many MTP layers the checkpoint of a model has."""
    config = model.config.get_text_config(decoder=True)
    layer_counts = [getattr(config, name, None) or getattr(model.config, name, None) for name in LAYER_COUNT_FIELDS]
    configured = next((number for number in layer_counts if isinstance(number, int)), 0)
    expected = re.compile("|".join(patterns_of(model)))
    mtp_tensors = list(filter(expected.search, _tensors_of(model)))
    stored = {number[1] for name in mtp_tensors if (number := re.search(r"\blayers\.(\d+)\.", name))}
    return min(configured or 1, len(stored) or configured or 1) if mtp_tensors else 0


def patterns_of(model: PreTrainedModel) -> list[str]:
    """Return patterns for names of MTP tensors: the model class's own, and one for layers after the model's last.

    The patterns in transformers cover layers beyond the last one only for the layer counts of published models.
    """
    ignored_patterns = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    first = int(model.config.get_text_config(decoder=True).num_hidden_layers)
    after_last = "|".join(map(str, range(first, first + MAX_LAYERS)))
    named = [pattern for pattern in ignored_patterns if "mtp" in pattern]
    return [*named, rf"^(model\.)?(language_model\.)?(model\.)?layers\.({after_last})\."]


def load_mtp(model: PreTrainedModel) -> LibraryMtp:
    """Load the MTP layers of a model's checkpoint; raise FamilyError or HeadsError if that is impossible."""
    try:
        from transformers.modeling_layers import MtpModel
    except ImportError:
        raise FamilyError("MTP layers need transformers 5.23 or newer: update it, or " + OTHER_METHOD_ADVICE) from None
    name = model.config.name_or_path
    if not (number := mtp_layers_of(model)):
        raise HeadsError(f"the checkpoint of {name or 'this model'} has no MTP layers: {TRAINING_ADVICE}")
    use_masked_attention(model)
    try:
        library_model: Any = WithMtpLayers(model, number)
        layers: Any = MtpModel.from_pretrained(library_model, device_map={"": model.device})
        layers.config._attn_implementation = attention_of(model.config)
        return LibraryMtp(layers, int(model.get_output_embeddings().weight.shape[1]))
    except Exception as error:  # the library raises many kinds for checkpoints that it does not know
        kind = model.config.model_type
        raise HeadsError(
            f"the MTP layers of {name} cannot be used (type {kind!r}: {error_reason(error)}): {OTHER_METHOD_ADVICE}"
        ) from error


def _tensors_of(model: PreTrainedModel) -> list[str]:
    """Return the names of the tensors in a model's checkpoint; an empty list if its files are not on this machine."""
    import json

    from safetensors import safe_open
    from transformers.utils.hub import cached_file

    name = model.config.name_or_path
    if not name:
        return []
    try:
        folder = Path(name)
        paths = {file: folder / file for file in (INDEX_FILE, SINGLE_FILE) if (folder / file).is_file()}
        if not folder.is_dir():
            resolved = {file: cached_file(name, file, local_files_only=True) for file in (INDEX_FILE, SINGLE_FILE)}
            paths = {file: Path(place) for file, place in resolved.items() if place}
        if INDEX_FILE in paths:
            return list(json.loads(paths[INDEX_FILE].read_text(encoding="utf-8"))["weight_map"])
        if SINGLE_FILE not in paths:
            return []
        with safe_open(paths[SINGLE_FILE], framework="pt") as file:
            return list(file.keys())
    except (OSError, ValueError, KeyError):
        return []


MTP_CACHE_NAME = "MTP layers"


def mtp_drafter(target: Target, *, is_measured: bool) -> TrainedDrafter:
    """Return a drafter for the MTP layers of the target's checkpoint.

    If ``is_measured``, a single layer, which is applied repeatedly, runs only the passes that pay.
    """
    with target.changing():
        layers = loaded_once(target, MTP_CACHE_NAME, lambda: _loaded(target))
        columns = target.watch_hidden()
    if layers.number > 1:
        return MtpLayersInTurn(layers, target, columns)
    pace = pace_for(target, MTP_CACHE_NAME, is_measured=is_measured)
    return SequentialDrafter(IteratedMtp(layers, target), pace, columns=columns)


def _loaded(target: Target) -> LibraryMtp:
    layers = load_mtp(target.model)
    if target.device.type == "cpu":
        compile_linear_layers(layers.own)
    return layers


class IteratedMtp(DraftPasses):
    """A single MTP layer, which is applied repeatedly to its own hidden states."""

    def __init__(self, layers: LibraryMtp, target: Target) -> None:
        super().__init__(
            lambda tokens, hidden, positions, cache, mask: [layers.run(0, tokens, hidden, positions + 1, cache, mask)],
            lambda hidden: topk_tokens(layers.logits(hidden), TOKENS_PER_RANKING),
            layers.shapes,
            width=layers.width,
            window=layers.window(0),
            target=target,
        )


class MtpLayersInTurn(BlockDrafter):
    """Several MTP layers in turn; each reads the hidden states of the layer before it, one position further ahead.

    At the last positions, all layers but the first read drafted tokens; once the accepted tokens are known, these
    layers read the positions again.
    """

    def __init__(self, layers: LibraryMtp, target: Target, columns: slice) -> None:
        self._layers, self._device = layers, target.device
        self._cache = Cache(layers.shapes)
        windows = map(layers.window, range(layers.number))
        self._masks = [
            AttentionMasks([AttentionWindow(FULL, window)], target.dtype, target.device) for window in windows
        ]
        super().__init__(Calibration(None, layers.number), columns)

    def _restart(self) -> None:
        self._cache.slots[0].cut(0)
        self._hidden: torch.Tensor | None = None
        self._tokens: list[int] = []
        """Hidden states and tokens of the accepted positions that not all layers have read with accepted tokens."""

    def _rank(self, hidden: torch.Tensor, tokens: list[int], max_nodes: int) -> Ranked:
        self._tokens += tokens
        self._hidden = hidden = hidden if self._hidden is None else torch.cat([self._hidden, hidden])
        settled, read = self._cache.slots[0].length, list(self._tokens)
        self._cache.reserve(extent_for(settled + len(read)))
        ranked = list[Ranked]()
        for layer in range(min(self._layers.number, max_nodes)):
            hidden = self._read(layer, hidden, read, settled)
            ranked.append(on_host(topk_tokens(self._layers.logits(hidden[-1:]), TOKENS_PER_RANKING)))
            read = [*read[1:], int(ranked[-1][0][0, 0])]
        kept = max(0, len(self._tokens) - (self._layers.number - 1))
        self._cache.slots[0].kv.length = settled + kept
        self._hidden, self._tokens = self._hidden[kept:], self._tokens[kept:]
        best, probs = map(np.concatenate, zip(*ranked, strict=True))
        return best, probs

    def _proposal(self) -> Proposal:
        number = len(self.tokens)
        after = np.full(self.tokens.shape, NO_RANKING_AFTER)
        after[:-1, 0] = np.arange(1, number)  # each layer reads the best token of the layer before it
        return Proposal(self.tokens, self.probs, after, np.full(number, NO_RANKING_AFTER), np.arange(number))

    def _read(self, layer: int, hidden: torch.Tensor, tokens: list[int], settled: int) -> torch.Tensor:
        """Read ``tokens`` into a layer's cache, from position ``settled`` on; return their hidden states."""
        slot, parts = self._cache.slots[0], list[torch.Tensor]()
        for start in range(0, len(tokens), READ_CHUNK):
            ids = torch.tensor([tokens[start : start + READ_CHUNK]], device=self._device)
            slot.kv.length = first = settled + start
            new = ids.shape[1]
            positions = torch.arange(first, first + new, device=self._device)[None] + layer + 1
            mask = self._masks[layer].continuation_mask(new, first)
            parts.append(
                self._layers.run(layer, ids, hidden[None, start : start + READ_CHUNK], positions, slot.view(new), mask)[
                    0
                ]
            )
        return torch.cat(parts)
