"""Whole passes around compiled layers, without the Python code that a model has for embeddings, positions and logits.

That code has little to compute and takes a millisecond, which is a fifth of a pass of a small model.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import Embedding, Linear, Module, Parameter

from hdtool.runtime.kernels.compact_weight import embedded
from hdtool.runtime.kernels.fused.elementwise import norm_rows
from hdtool.runtime.model.cache.kv_cache import SlotKVCache, StaticKVCache
from hdtool.runtime.model.fused.layer_parts import epsilon_of
from hdtool.runtime.model.fused.layer_stack import LayerStack
from hdtool.runtime.model.fused.unchanged import Unchanged
from hdtool.runtime.tree import OPEN, Certain

OF_MODEL, OF_DECODER = {"model", "lm_head"}, {"embed_tokens", "layers", "norm", "rotary_emb"}
FIXED_ROTARY = ("default", "linear", "llama3", "yarn")
"""Kinds of rotary positions that do not depend on how long a context is."""
FEWEST_POSITIONS = 1024
"""Rotary positions that are computed at once, at least."""


class WholePass:
    """Embeddings, compiled layers, the last norm and the logits of one model."""

    def __init__(self, stack: LayerStack, model: Module, decoder: Module) -> None:
        self._stack = stack
        self._embedding, self._rotary = decoder.get_submodule("embed_tokens"), decoder.get_submodule("rotary_emb")
        self._norm, self._head = decoder.get_submodule("norm"), model.get_submodule("lm_head")
        self._epsilon = epsilon_of(self._norm)
        self._unchanged = Unchanged((model, decoder, self._embedding, self._rotary, self._norm, self._head))
        self._positions = torch.empty(0), torch.empty(0)

    @property
    def is_known(self) -> bool:
        """Whether all parts are of the kinds that this code computes."""
        embedding = self._embedding
        return (
            type(embedding) is Embedding
            and embedding.max_norm is None
            and isinstance(self._head, Linear)
            and self._epsilon is not None
            and type(self._norm._parameters["weight"]) is Parameter
            and getattr(self._rotary, "rope_type", None) in FIXED_ROTARY
        )

    def check_again(self) -> None:
        """Before the next pass, compare modules and weights with the recorded ones."""
        self._unchanged.check_again()

    def logits(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        mask: Any,
        cache: Any,
        certain: Certain = None,
        *,
        last_only: bool,
    ) -> torch.Tensor | None:
        """The logits of a pass, of its last tokens with ``last_only``; None for a pass that the model computes.

        After a row with a ``certain`` token, all others are minus infinity.
        """
        if not self._takes(ids, mask, cache):
            return None
        weight: Any = self._embedding.weight
        hidden = embedded(weight, ids)
        given = {
            "attention_mask": mask,
            "position_embeddings": self._rotated(positions, cache.length + ids.shape[1]),
            "past_key_values": cache,
        }
        if not self._stack.takes(hidden, given):
            return None
        hidden = self._stack.compute(hidden, given)
        if last_only:
            hidden = hidden[:, -1:].contiguous()
        elif certain is not None and (certain != OPEN).any():
            return self._logits_of_open(hidden, certain)
        return self._head(self._normed(hidden))  # type: ignore[no-any-return]

    def _logits_of_open(self, hidden: torch.Tensor, certain: npt.NDArray[np.int64]) -> torch.Tensor:
        """Logits that the output layer computes only for rows without a certain token."""
        rows = torch.from_numpy(np.flatnonzero(certain == OPEN))
        head: Any = self._head
        found = torch.full((1, len(certain), head.out_features), -torch.inf)
        if len(rows):
            found[0, rows] = head(self._normed(hidden[:, rows]))[0]
        rows = torch.from_numpy(np.flatnonzero(certain != OPEN))
        # Zero times the sum is not a number where the row overflowed, which acceptance must see.
        found[0, rows, torch.from_numpy(certain)[rows]] = 0 * hidden[0, rows].float().sum(-1)
        return found

    def _takes(self, ids: torch.Tensor, mask: object, cache: object) -> bool:
        return (
            self._unchanged()
            and isinstance(cache, StaticKVCache | SlotKVCache)
            and self._stack.takes_number(ids.numel())
            and (mask is not None or ids.numel() == 1)
        )

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
    made = WholePass(stack, model, decoder)
    return made if made.is_known else None
