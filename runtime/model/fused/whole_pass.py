"""Whole passes around compiled layers, without the Python code that a model has for embeddings, positions and logits.

That code has little to compute and takes a millisecond, which is a fifth of a pass of a small model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import Embedding, Linear, Module, Parameter

from hdtool.runtime.kernels.compact_weight import is_compact
from hdtool.runtime.kernels.fused.elementwise import norm_rows
from hdtool.runtime.kernels.packed.matrix import PackedMatrix
from hdtool.runtime.model.cache.kv_cache import SlotKVCache, StaticKVCache
from hdtool.runtime.model.fused.layer_parts import epsilon_of
from hdtool.runtime.model.fused.layer_stack import LayerStack
from hdtool.runtime.model.fused.unchanged import Unchanged

OF_MODEL, OF_DECODER = {"model", "lm_head"}, {"embed_tokens", "layers", "norm", "rotary_emb"}
FIXED_ROTARY = ("default", "linear", "llama3", "yarn")
"""Kinds of rotary positions that do not depend on how long a context is."""
FEWEST_POSITIONS = 1024
"""Rotary positions that are computed at once, at least."""


class WholePass:
    """Embeddings, compiled layers, the last norm and the logits of one model."""

    def __init__(self, model: Module, stack: LayerStack) -> None:
        decoder = model.get_submodule("model")
        self._stack = stack
        self._embedding, self._rotary = decoder.get_submodule("embed_tokens"), decoder.get_submodule("rotary_emb")
        self._norm, self._head = decoder.get_submodule("norm"), model.get_submodule("lm_head")
        self._epsilon = epsilon_of(self._norm)
        own = (model, decoder, self._embedding, self._rotary, self._norm, self._head)
        self._unchanged, self._is_checked = Unchanged(own), False
        self._positions = torch.empty(0), torch.empty(0)

    def check_again(self) -> None:
        """Before the next pass, compare modules and weights with the recorded ones."""
        self._is_checked = False

    def logits(
        self, ids: torch.Tensor, positions: torch.Tensor, mask: Any, cache: Any, *, last_only: bool
    ) -> torch.Tensor | None:
        """The logits of a pass, of its last tokens with ``last_only``; None for a pass that the model computes."""
        if not self._takes(ids, mask, cache):
            return None
        hidden = self._embedded(ids)
        given = {
            "attention_mask": mask,
            "position_embeddings": self._rotated(positions, cache.length + ids.shape[1]),
            "past_key_values": cache,
        }
        if not self._stack.takes(hidden, given):
            return None
        hidden = self._stack.compute(hidden, given)
        return self._head(self._normed(hidden[:, -1:].contiguous() if last_only else hidden))  # type: ignore[no-any-return]

    def _takes(self, ids: torch.Tensor, mask: object, cache: object) -> bool:
        if not self._is_checked:
            self._is_checked = self._unchanged()
        return (
            self._is_checked
            and isinstance(cache, StaticKVCache | SlotKVCache)
            and self._stack.takes_number(ids.numel())
            and (mask is not None or ids.numel() == 1)
        )

    def _embedded(self, ids: torch.Tensor) -> torch.Tensor:
        """A compact weight expands the same rows by itself, which takes a quarter of a millisecond."""
        weight: Any = self._embedding.weight
        if not is_compact(weight):
            return torch.embedding(weight, ids)
        stored = weight.stored
        if not isinstance(stored, PackedMatrix):
            return torch.embedding(stored, ids).float()
        blocks = torch.embedding(stored.blocks, ids.view(-1))
        return PackedMatrix(blocks, stored.format).float().view(*ids.shape, -1)

    def _rotated(self, positions: torch.Tensor, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The cosines and sines of positions below ``end``, which the model's own module has computed."""
        if len(self._positions[0]) < end:
            count = max(FEWEST_POSITIONS, end + end // 4)
            cos, sin = self._rotary(torch.empty(0), torch.arange(count)[None])
            self._positions = cos[0], sin[0]
        shape = *positions.shape, -1
        cos, sin = (table.index_select(0, positions.view(-1)).view(shape) for table in self._positions)
        return cos, sin

    def _normed(self, hidden: torch.Tensor) -> torch.Tensor:
        weight: Any = self._norm.weight
        normed = torch.empty_like(hidden)
        width = hidden.shape[-1]
        numbers = hidden.data_ptr(), hidden.numel() // width, width, weight.data_ptr()
        norm_rows(*numbers, self._epsilon, normed.data_ptr())
        return normed


def whole_pass_of(model: Module, stack: LayerStack) -> WholePass | None:
    """The whole passes of a model; None if it has other parts than its layers, an embedding, a norm and a head."""
    decoder = model._modules.get("model")
    if set(model._modules) != OF_MODEL or decoder is None or set(decoder._modules) != OF_DECODER:
        return None
    embedding, norm, rotary, head = (
        decoder.get_submodule("embed_tokens"),
        decoder.get_submodule("norm"),
        decoder.get_submodule("rotary_emb"),
        model.get_submodule("lm_head"),
    )
    plain = type(embedding) is Embedding and embedding.max_norm is None and isinstance(head, Linear)
    if not plain or epsilon_of(norm) is None or type(norm._parameters["weight"]) is not Parameter:
        return None
    if getattr(rotary, "rope_type", None) not in FIXED_ROTARY:
        return None
    return WholePass(model, stack)
