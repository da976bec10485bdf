"""Drafting by multi-token-prediction (MTP) layers: a single layer applied repeatedly, or several layers in turn.

No other module uses ``MtpModel`` of transformers. Checkpoints store MTP layers beside the model's other
layers; most configurations state the number of MTP layers, under different names.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from hdtool.data.errors import FamilyError, HeadsError, error_reason
from hdtool.runtime.caches.kv_cache import KVTensors, LayerShape, layer_shapes
from hdtool.runtime.core.engine_interface import TopTokens
from hdtool.runtime.core.tolerances import distances, tolerance_of
from hdtool.runtime.drafters.trained.block_drafter import BlockDrafter
from hdtool.runtime.drafters.trained.checkpoints import loaded_once
from hdtool.runtime.drafters.trained.draft_passes import DraftPasses, ReadingPasses
from hdtool.runtime.drafters.trained.module_parts import topk_tokens
from hdtool.runtime.drafters.trained.path_drafting import path_drafter
from hdtool.runtime.drafters.trained.proposal import TOKENS_PER_RANKING, Calibration, Proposal
from hdtool.runtime.drafters.trained.proposer import TrainedProposer
from hdtool.runtime.kernels.linear_layers import compile_linear_layers
from hdtool.runtime.model.pass_inputs import FULL, AttentionMasks, AttentionWindow, CacheRows
from hdtool.runtime.model.transformers_internals import attention_of, use_masked_attention
from hdtool.runtime.program.embedding_and_head import norms_and_activations_match
from hdtool.runtime.program.model_parts import ModelParts, layers_of, model_parts
from hdtool.runtime.weights.hub import INDEXES, cached_snapshot, weight_files, weight_map

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hdtool.runtime.budget.trained_drafter_gate import TrainedDrafterGate
    from hdtool.runtime.target.target import Target

LAYER_COUNT_FIELDS = ("num_mtp_layers", "num_nextn_predict_layers", "mtp_num_hidden_layers")
"""Configuration fields that may hold the number of MTP layers."""
MAX_LAYERS = 8
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
        self._mask: torch.Tensor | None = None
        # transformers would make causal masks for its own cache; draft trees need other masks.
        layers.create_masks_for_mtp_layer = lambda *_: {"attention_mask": self._mask}
        self.width = width
        self.shapes = self._shapes()
        """Shapes of the tensors that each layer caches per position."""
        self._programs: list[Callable[..., torch.Tensor]] = []
        """Each layer as a program; empty for layers that transformers' code computes."""

    @property
    def own(self) -> torch.nn.Module:
        """The MTP layers without shared parts."""
        return cast(torch.nn.Module, self._layers.layers)

    @cached_property
    def windows(self) -> list[AttentionWindow]:
        """The attention window of each layer."""
        config = self._layers.config
        kinds = getattr(config, "layer_types", None) or [FULL] * self.number
        return [
            AttentionWindow(kind, config.sliding_window if "sliding" in kind else None) for kind in kinds[: self.number]
        ]

    @torch.inference_mode()
    def _shapes(self) -> list[LayerShape]:
        from transformers.cache_utils import DynamicCache

        weight = next(self.own.parameters())
        cache = DynamicCache(config=self._layers.config)
        tokens = torch.zeros(2, dtype=torch.int64, device=weight.device)
        hidden, mask = weight.new_ones((2, self.width)), weight.new_zeros((1, 1, 2, 2))
        for layer in range(self.number):
            self._forward(layer, tokens, hidden, tokens, cache, mask)
        if any(hasattr(layer, "conv_states") for layer in cache.layers):
            raise NotImplementedError("layers that keep states")
        return layer_shapes(cache)

    def run(
        self, layer: int, tokens: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, rows: CacheRows
    ) -> torch.Tensor:
        """Return a layer's state after each token; ``hidden`` holds the state before each, at ``positions``."""
        if self._programs:
            part = self._layers.layers[layer]
            joined = torch.cat([part.enorm(self._layers.embed_tokens(tokens)), part.hnorm(hidden)], dim=-1)
            return self._programs[layer](part.eh_proj(joined), positions + 1, rows, first=layer)
        mask = rows.mask_of(self.windows[layer].kind)
        return self._forward(layer, tokens, hidden, positions + 1, rows.cache, mask)

    @torch.inference_mode()
    def use_program(self, target: Target) -> None:
        """Compute the layers by the engines' program if a table describes them and only rounding differs."""
        described = _described(self._layers, target)
        if not described:
            return
        places = torch.arange(2, device=target.device)
        hidden = torch.linspace(-1, 1, 2 * self.width, dtype=target.dtype, device=target.device).view(2, -1)
        mask = AttentionMasks(self.windows[:1], target.dtype, target.device).causal_mask(places, 2)
        rows = CacheRows(KVTensors.for_layers(self.shapes, 2), places, 2, mask)
        expected = [self.run(layer, places, hidden, places, rows) for layer in range(self.number)]
        self._programs = [
            target.drafter_layers(parts, [window]).run for parts, window in zip(described, self.windows, strict=True)
        ]
        try:
            actual = [self.run(layer, places, hidden, places, rows) for layer in range(self.number)]
            error = max(float(distances(*pair).max()) for pair in zip(actual, expected, strict=True))
        except NotImplementedError:  # the rotary positions fit no head
            error = math.inf
        if not error <= tolerance_of(target.dtype):
            self._programs = []

    def _forward(
        self,
        layer: int,
        tokens: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        cache: Any,
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        self._mask = mask
        states = self._layers.forward_layer(layer, hidden[None], positions[None], cache, input_ids=tokens[None])
        return cast(torch.Tensor, states[0])

    def best_after(self, hidden: torch.Tensor) -> TopTokens:
        """Return the best next tokens, given a layer's states, and their probabilities."""
        return topk_tokens(self._layers._project_to_logits(hidden), TOKENS_PER_RANKING)


def _described(layers: Any, target: Target) -> list[ModelParts[torch.nn.Module]]:
    """Return the parts of each MTP layer; an empty list if the model, or its use of these layers, is not described."""
    kind = target.program_support
    parts, blocks = model_parts(target.model, kind), [layer.mtp_block for layer in layers.layers]
    is_usual = layers.use_post_norm and not layers.use_shared_post_norm and not layers.has_per_layer_rope
    if parts is None or not is_usual or getattr(layers.config, "mtp_hidden_states_first", False):
        return []
    described = [
        replace(parts, model=layer, layers=[block], norm=layer.post_norm, inputs=None)
        for layer, block in zip(layers.layers, layers_of(torch.nn.ModuleList(blocks), kind), strict=False)
    ]
    return described if all(norms_and_activations_match(each, target.device) for each in described) else []


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
    return FULL if FULL in kinds or not others else others[-1]


def mtp_layers_of(model: PreTrainedModel) -> int:
    """Return how many MTP layers the checkpoint of a model has; 0 if its files are not on this machine."""
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
    from safetensors import safe_open

    name, names = model.config.name_or_path, list[str]()
    folder = Path(name) if name and Path(name).is_dir() else cached_snapshot(name or "")
    files = weight_files(folder) if folder else None
    listed = weight_map(folder, INDEXES[:1]) if folder and files else None
    if files and listed and {*listed.values()} <= {file.name for file in files}:
        return list(listed)
    try:
        for path in files or ():
            if path.suffix == ".safetensors":
                with safe_open(path, framework="pt") as file:
                    names += file.keys()
    except (OSError, ValueError):
        return []
    return names


MTP_CACHE_NAME = "MTP layers"


def mtp_drafter(target: Target, gate: TrainedDrafterGate | None = None) -> TrainedProposer:
    """Return a drafter for the MTP layers of the target's checkpoint; a single layer is applied repeatedly."""
    with target.changing():
        layers = loaded_once(target, MTP_CACHE_NAME, lambda: _loaded(target))
        columns = target.watch_hidden()
    if layers.number > 1:
        module, calibration = MtpLayersInTurn(layers, target), Calibration(None, layers.number)
        return BlockDrafter(module, calibration, columns, gate=gate, arrange=Proposal.in_turn)
    return path_drafter(IteratedMtp(layers, target), target.captures, columns, gate)


def _loaded(target: Target) -> LibraryMtp:
    layers = load_mtp(target.model)
    if target.device.type == "cpu":
        compile_linear_layers(layers.own)
    layers.use_program(target)
    return layers


class IteratedMtp(DraftPasses):
    """A single MTP layer, which is applied repeatedly to its own hidden states."""

    def __init__(self, layers: LibraryMtp, target: Target) -> None:
        super().__init__(
            lambda tokens, hidden, positions, rows: [layers.run(0, tokens, hidden, positions, rows)],
            layers.best_after,
            layers.shapes,
            width=layers.width,
            windows=layers.windows,
            target=target,
        )


class MtpLayersInTurn(ReadingPasses):
    """Several MTP layers in turn; each reads the hidden states of the layer before it, one position further ahead.

    At the last positions, all layers but the first read drafted tokens; once the accepted tokens are known, these
    layers read the positions again.
    """

    def __init__(self, layers: LibraryMtp, target: Target) -> None:
        self._layers, number = layers, layers.number
        hidden = torch.empty((0, layers.width), dtype=target.dtype, device=target.device)
        super().__init__(layers.shapes, hidden, target, windows=layers.windows, rankings=number)
        self.begin([])

    def begin(self, prompt: list[int]) -> None:
        super().begin(prompt)
        self._hidden: torch.Tensor | None = None
        self._tokens: list[int] = []
        """Hidden states and tokens of the accepted positions that not all layers have read with accepted tokens."""

    def _with_unread(self, hidden: torch.Tensor, tokens: list[int]) -> tuple[torch.Tensor, list[int]]:
        if self._hidden is not None:
            hidden, tokens = torch.cat([self._hidden, hidden]), self._tokens + tokens
        self._hidden, self._tokens = hidden, tokens
        return hidden, tokens

    def _accept(self, new: int) -> None:
        kept = max(0, new - (self._layers.number - 1))
        super()._accept(kept)
        assert self._hidden is not None
        self._hidden, self._tokens = self._hidden[kept:], self._tokens[kept:]

    def _cache_rows(self, tokens: torch.Tensor, hidden: torch.Tensor, places: torch.Tensor, extent: int) -> None:
        rows = self._causal_rows(places, extent)
        for layer in range(self._layers.number):  # what wraps around at the end is read again
            hidden = self._layers.run(layer, tokens.roll(-layer), hidden, places + layer, rows)

    def _ranked(self, tokens: torch.Tensor, hidden: torch.Tensor, last: torch.Tensor, rows: CacheRows) -> TopTokens:
        ranked = list[TopTokens]()
        for layer in range(self._layers.number):
            hidden = self._layers.run(layer, tokens, hidden, rows.places + layer, rows)
            ranked.append(self._layers.best_after(hidden.index_select(0, last)))
            tokens = tokens.roll(-1).index_copy(0, last, ranked[-1][0][0, :1])
        best, probs = map(torch.cat, zip(*ranked, strict=True))
        return best, probs
