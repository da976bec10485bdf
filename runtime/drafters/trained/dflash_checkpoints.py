"""Loads DFlash and DSpark drafters from checkpoints of transformers, of their authors and of vLLM's speculators."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional

from hdtool.data.errors import FamilyError, error_reason
from hdtool.runtime.drafters.trained.checkpoints import OF_THIS_MODEL, renamed_parameter
from hdtool.runtime.drafters.trained.dspark import MARKOV_KINDS, VANILLA, DSparkHeads, MarkovHead
from hdtool.runtime.drafters.trained.module_parts import CastingNorm
from hdtool.runtime.model.pass_inputs import FULL, SLIDING, AttentionWindow, windows_of
from hdtool.runtime.program.embedding_and_head import windows_of_layers
from hdtool.runtime.program.llama_like_families import GELU, AttentionKind, Family, MlpKind
from hdtool.runtime.program.model_parts import FIXED_ROTARY, ModelParts, layers_of

if TYPE_CHECKING:
    from hdtool.runtime.drafters.trained.checkpoints import PublishedDrafter
    from hdtool.runtime.target.target import Target

RENAMED_PARAMETERS = {"fc.": "encoder.fc.", "hidden_norm.": "encoder.output_norm_enc.", "midlayer.": "layers.0."}
"""Maps prefixes of tensor names in other checkpoints to those of transformers."""
UNUSED_TENSORS = ("t2d", "verifier_", "mask_embedding", "rotary_emb.")
"""Prefixes of the names of tensors that serve only training, or that follow from the configuration."""
MARKOV, CONFIDENCE = "markov_head.", "confidence_head."
LAYER_SETTINGS = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_act",
    "rms_norm_eps", "rope_parameters", "max_position_embeddings",
)  # fmt: skip
FAMILY_NAME, FAMILY = (
    "muse_glimmer_assistant",
    Family(attention=AttentionKind(is_causal=False), mlp=MlpKind(frozenset({"silu"}) | GELU)),
)
"""The package of transformers that has a drafter's layers, and how they differ from Llama's."""
DEFAULT_RANK = 256
"""Rank of the Markov head in checkpoints of vLLM's speculators that don't state it."""


@dataclass(frozen=True)
class DFlashModel:
    """A loaded drafter, on the device of its target."""

    parts: ModelParts[nn.Module]
    encoder: Any
    """Linear layer ``fc`` and norm ``output_norm_enc``, which turn the target's hidden states into what layers read."""
    layer_ids: list[int]
    """Indices of the target's layers whose outputs the drafter reads."""
    block: int
    """Number of tokens in a block, of which the first is the last accepted one."""
    mask_token: int
    windows: list[AttentionWindow]
    """The attention window of each layer."""
    embed: Callable[[torch.Tensor], torch.Tensor]
    head: Callable[[torch.Tensor], torch.Tensor]
    token_ids: torch.Tensor | None = None
    """The target's id of each draft token; None if draft tokens have the target's ids."""
    causal: Collection[str] = ()
    """Kinds of layers in which a token doesn't read those after it in the block."""
    first: int = 1
    """Index of the token in the block at which the first draft is predicted."""
    heads: DSparkHeads | None = None

    @property
    def read_width(self) -> int:
        """Width of the target's hidden states that the drafter reads."""
        return int(self.encoder.fc.in_features)

    def encode(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the layers' input for accepted tokens, given the target's hidden states."""
        encoded: torch.Tensor = self.encoder.output_norm_enc(self.encoder.fc(hidden))
        return encoded

    def check(self, published: PublishedDrafter, target: Target) -> None:
        """Raise HeadsError if the drafter does not fit the target."""
        if self.block <= self.first:
            raise published.refusal(f"drafts blocks of {self.block}")
        number, ids = int(target.config.num_hidden_layers), self.layer_ids
        if not ids or min(ids) < 0 or max(ids) >= number:
            raise published.refusal(f"reads layers {ids}, and this model has {number}", OF_THIS_MODEL)
        if not 0 <= self.mask_token <= (last := target.vocabulary - 1):
            fault = f"reads token {self.mask_token} in place of drafts, and this model has tokens 0 to {last}"
            raise published.refusal(fault, OF_THIS_MODEL)


def load_dflash(published: PublishedDrafter, target: Target) -> DFlashModel:
    """Load a drafter.

    Raise HeadsError if it is damaged or unfit for the target, and FamilyError if transformers is too old.
    """
    try:
        from transformers import CONFIG_MAPPING, MuseGlimmerAssistantModel
    except ImportError:
        raise FamilyError("DFlash drafters need transformers 5.23 or newer: update it") from None
    kind = str(published.settings.get("model_type"))
    if kind in CONFIG_MAPPING and hasattr(CONFIG_MAPPING[kind], "target_layer_ids"):
        loaded = _load_transformers_format(published, target)
    else:
        loaded = _load_other_format(published, target, MuseGlimmerAssistantModel)
    loaded.check(published, target)
    return loaded


def _load_transformers_format(published: PublishedDrafter, target: Target) -> DFlashModel:
    from transformers import AutoModel

    model = published.pretrained(AutoModel)
    config = model.config
    published.require_width(int(config.hidden_size), target)
    parts, windows = _described(model, published, target)
    return DFlashModel(
        parts=parts,
        encoder=_encoder_of(model),
        layer_ids=list(config.target_layer_ids),
        block=int(config.block_size),
        mask_token=int(config.mask_token_id),
        # A token's distance to the tokens that it reads is at most the window in these models, not less.
        windows=[replace(each, window=each.window and each.window + 1) for each in windows],
        embed=without_norm(target.model.get_input_embeddings()),
        head=target.model.get_output_embeddings(),
    )


def _load_other_format(published: PublishedDrafter, target: Target, library_model: Any) -> DFlashModel:
    try:
        settings = _flat(published.settings)
        config = _config_of(settings)
        rank, scale = int(settings["markov_rank"]), float(settings["input_embedding_scale"])
        if rank < 0:
            raise ValueError(f"a Markov head of rank {rank}")
        model = library_model(config)
    except Exception as error:  # settings of unknown kinds raise many
        reason = f"no {error} in its settings" if isinstance(error, KeyError) else error_reason(error)
        raise published.refusal(f"cannot be loaded ({reason})") from error
    if (kind := settings["markov_head_type"]) not in MARKOV_KINDS:
        raise published.refusal(f"has a Markov head of kind {kind!r}")
    published.require_width(int(config.hidden_size), target)
    tensors = {
        renamed_parameter(name, RENAMED_PARAMETERS): tensor
        for name, tensor in published.tensors().items()
        if not name.startswith(UNUSED_TENSORS)
    }
    of_heads = {name: tensors.pop(name) for name in list(tensors) if name.startswith((MARKOV, CONFIDENCE))}
    embedding, head, offsets = (tensors.pop(name, None) for name in ("embed_tokens.weight", "lm_head.weight", "d2t"))
    published.fill(model, tensors, known_only=True)
    for rows in (embedding, head if offsets is None else None, of_heads.get(f"{MARKOV}markov_w1.weight")):
        if rows is not None:
            published.require_vocabulary(len(rows), target)
    for rows in (embedding, head):
        if rows is not None:
            published.require_width(rows.shape[-1], target)
    drafted, is_causal = target.vocabulary if head is None else len(head), settings.get("is_causal")
    parts, windows = _described(model, published, target)
    return DFlashModel(
        parts=parts,
        encoder=_encoder_of(model),
        layer_ids=list(config.target_layer_ids),
        block=int(config.block_size),
        mask_token=int(config.mask_token_id),
        windows=windows,
        embed=_embedding(embedding, target, scale),
        head=_head(head, target),
        token_ids=published.token_ids(offsets, drafted, target),
        causal=(SLIDING,) if is_causal is None else (FULL, SLIDING) if is_causal else (),
        first=0 if settings["sample_from_anchor"] else 1,
        heads=_heads(of_heads, kind, rank, drafted, published, target) if rank else None,
    )


def _flat(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of either format in one dictionary, under the names that the authors' format uses."""
    layer, own = settings.get("transformer_layer_config") or {}, settings.get("dflash_config") or {}
    is_dspark = "dspark" in f"{settings.get('architectures')} {settings.get('speculators_model_type')}".lower()
    flat = {
        "markov_rank": DEFAULT_RANK if is_dspark and layer else 0,
        "markov_head_type": VANILLA,
        "input_embedding_scale": 1.0,
        "sample_from_anchor": is_dspark,
        "is_causal": own.get("causal", False if settings.get("sliding_window_non_causal") else None),
        **_given(layer),
        **_given(settings),
        **_given(own),
        "model_type": layer.get("model_type") or settings.get("model_type") or "qwen3",
    }
    if counted := flat.get("aux_hidden_state_layer_ids"):  # which counts the embeddings, too
        flat["target_layer_ids"] = [int(number) - 1 for number in counted]
    return flat


def _given(settings: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if value is not None}


def _config_of(settings: dict[str, Any]) -> Any:
    """Return a configuration of transformers' DFlash model; raise an error if settings are missing or unknown."""
    from transformers import CONFIG_MAPPING, MuseGlimmerAssistantConfig

    if (kind := settings["model_type"]) not in CONFIG_MAPPING:
        raise ValueError(f"layers of type {kind!r}")
    layer = CONFIG_MAPPING[kind].from_dict(settings)
    return MuseGlimmerAssistantConfig(
        **{name: getattr(layer, name) for name in LAYER_SETTINGS},
        head_dim=getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads,
        layer_types=getattr(layer, "layer_types", None) or [FULL] * layer.num_hidden_layers,
        sliding_window=getattr(layer, "sliding_window", None) or layer.max_position_embeddings,
        target_layer_ids=[int(number) for number in settings["target_layer_ids"]],
        block_size=int(settings["block_size"]),
        mask_token_id=int(settings["mask_token_id"]),
    )


def _heads(
    tensors: dict[str, torch.Tensor], kind: str, rank: int, drafted: int, published: PublishedDrafter, target: Target
) -> DSparkHeads:
    width = int(target.config.hidden_size)
    weight = tensors.get(f"{CONFIDENCE}proj.weight")
    confidence = None
    if weight is not None:
        if weight.shape[-1] not in (width, width + rank):
            raise published.refusal(f"has another shape of {CONFIDENCE}proj.weight")
        confidence = nn.Linear(weight.shape[-1], 1, bias=f"{CONFIDENCE}proj.bias" in tensors)
    heads = DSparkHeads(MarkovHead(kind, target.vocabulary, drafted, rank, width), confidence)
    published.fill(heads, tensors, known_only=True)
    return heads.to(target.device, target.dtype).requires_grad_(False).eval()


def _embedding(weight: torch.Tensor | None, target: Target, scale: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a drafter's embedding, which scales the drafter's own weights or else the target's by ``scale``."""
    shared = without_norm(target.model.get_input_embeddings())
    if weight is not None and not _is_copy(weight, shared):
        shared = nn.Embedding.from_pretrained(weight.to(target.device, target.dtype))
    factor = scale / float(getattr(shared, "embed_scale", 1.0))
    return shared if factor == 1 else lambda tokens: shared(tokens) * factor


def _head(weight: torch.Tensor | None, target: Target) -> Callable[[torch.Tensor], torch.Tensor]:
    shared: Any = target.model.get_output_embeddings()
    if weight is None or _is_copy(weight, shared):
        return shared  # type: ignore[no-any-return]
    own = weight.to(target.device, target.dtype)
    return lambda states: functional.linear(states, own)


def _is_copy(weight: torch.Tensor, module: Any) -> bool:
    """Return True if a module of the target has the same weight, so that the drafter needs none of its own."""
    kept: Any = getattr(module, "weight", None)
    is_plain = type(kept) is nn.Parameter and kept.is_floating_point() and kept.shape == weight.shape
    return is_plain and torch.equal(weight.to(kept), kept)


def without_norm(embedding: Any) -> Any:
    """Return token embeddings without the norm that some models apply to them."""
    if not hasattr(embedding, "embed_norm"):
        return embedding
    bare = copy.copy(embedding)  # shares the parameters
    bare._modules = {**embedding._modules, "embed_norm": torch.nn.Identity()}
    return bare


def _described(
    model: Any, published: PublishedDrafter, target: Target
) -> tuple[ModelParts[nn.Module], list[AttentionWindow]]:
    """Move a model to the target's device; return its parts and each layer's window. Raise HeadsError if unknown."""
    model.to(target.device, target.dtype).requires_grad_(False).eval()
    layers = layers_of(model.layers, replace(target.program_support, families={FAMILY_NAME: FAMILY}))
    parts = ModelParts(
        model, model, None, layers, model.rotary_emb, model.norm, nn.Identity(), model.config.rms_norm_eps, FAMILY
    )
    windows = windows_of_layers(model.config, windows_of(model.config))
    if not layers or not windows or model.rotary_emb.rope_type not in FIXED_ROTARY:
        raise published.refusal("has layers of an unknown kind")
    return parts, windows


def _encoder_of(model: Any) -> Any:
    """Return the encoder of a drafter's model; its RMSNorm, of six kernels, becomes a fused one."""
    norm = model.encoder.output_norm_enc
    fused = CastingNorm(len(norm.weight), model.config.rms_norm_eps)
    fused.weight = norm.weight
    model.encoder.output_norm_enc = fused
    return model.encoder
