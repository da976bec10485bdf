"""Whole passes around compiled layers, without the Python code that a model has for embeddings, positions and logits.

That code has little to compute and takes a millisecond, which is a fifth of a pass of a small model.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import Embedding, Linear, Module, Parameter

from hdtool.runtime.kernels.compact_weight import CompactEmbedding, embedded, is_compact
from hdtool.runtime.kernels.fused.elementwise import norm_rows
from hdtool.runtime.kernels.fused.layers import Numbers
from hdtool.runtime.kernels.fused.passes import (
    BIAS,
    COSINES,
    EMBED,
    END_FIELDS,
    FIRST,
    IDS,
    KNOWN,
    LOGITS,
    NORM,
    POSITIONS,
    PROJECT,
    VOCABULARY,
    embedding_of,
)
from hdtool.runtime.kernels.small_batch_linear import SmallBatchLinear, form_of
from hdtool.runtime.model.checks.unchanged import Unchanged
from hdtool.runtime.model.fused.layer_parts import epsilon_of
from hdtool.runtime.model.fused.layer_stack import LayerStack
from hdtool.runtime.tree import OPEN, Certain

OF_MODEL, OF_DECODER = {"model", "lm_head"}, {"embed_tokens", "layers", "norm", "rotary_emb"}
FIXED_ROTARY = ("default", "linear", "llama3", "yarn")
"""Kinds of rotary positions that do not depend on how long a context is."""
FEWEST_POSITIONS = 1024
"""Rotary positions that are computed at once, at least."""


class WholePass:
    """Embeddings, compiled layers, the last norm and the logits of one model."""

    def __init__(self, stack: LayerStack, model: Module, decoder: Module) -> None:
        self.stack = stack
        self._embedding: Any = decoder.get_submodule("embed_tokens")
        self._rotary = decoder.get_submodule("rotary_emb")
        self._norm: Any = decoder.get_submodule("norm")
        self._head: Any = model.get_submodule("lm_head")
        epsilon = epsilon_of(self._norm)
        self._has_epsilon, self.epsilon = epsilon is not None, np.float32(epsilon or 0.0)
        self._unchanged = Unchanged((model, decoder, self._embedding, self._rotary, self._norm, self._head))
        self._positions = torch.empty(0), torch.empty(0)
        self._ends: Numbers | None = None
        """Addresses that are the same in all passes of an answer."""
        self.checks = 0
        """How often the model was to be compared."""

    @property
    def is_known(self) -> bool:
        """Whether all parts are of the kinds that this code computes."""
        embedding = self._embedding
        return (
            type(embedding) in (Embedding, CompactEmbedding)
            and embedding.max_norm is None
            and embedding.weight.dtype == torch.float32
            and embedding.weight.is_contiguous()
            and isinstance(self._head, Linear)
            and self._has_epsilon
            and type(self._norm._parameters["weight"]) is Parameter
            and getattr(self._rotary, "rope_type", None) in FIXED_ROTARY
        )

    def check_again(self) -> None:
        """Before the next pass, compare modules and weights with the recorded ones."""
        self._unchanged.check_again()
        self._ends = None
        self.checks += 1

    @property
    def outs(self) -> int:
        """Logits after each row."""
        return self._head.out_features  # type: ignore[no-any-return]

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
        slots, new = ids.shape
        if self._products_are_own(slots * new, slots * (1 if last_only else new)):
            return self._in_one_call(ids, positions, mask, cache, last_only=last_only)
        given = {
            "attention_mask": mask,
            "position_embeddings": self._rotated(positions, cache.length + new),
            "cache": cache,
        }
        hidden = self.stack.compute(embedded(self._embedding.weight, ids), given)
        if last_only:
            hidden = hidden[:, -1:].contiguous()
        elif certain is not None and (certain != OPEN).any():
            return self._logits_of_open(hidden, certain)
        return self._head(self._normed(hidden))  # type: ignore[no-any-return]

    def _in_one_call(
        self, ids: torch.Tensor, positions: torch.Tensor, mask: Any, cache: Any, *, last_only: bool
    ) -> torch.Tensor | None:
        (slots, new), outs = ids.shape, self._head.out_features
        first = new - 1 if last_only else 0
        ends = self.ends_below(cache.length + new)
        ends[IDS], ends[POSITIONS], ends[FIRST] = ids.data_ptr(), positions.data_ptr(), first
        room = self._head.memory.room_for if self._head.memory else _new_room
        logits: torch.Tensor = room(slots * (new - first), outs, self._norm.weight)
        ends[LOGITS] = logits.data_ptr()
        known = self.stack.compute_whole(slots, new, mask, cache, ends, self.epsilon)
        return logits.view(slots, new - first, outs) if known else None

    def ends_below(self, end: int) -> Numbers:
        """What ``compute_pass`` reads beside the layers, without what differs from pass to pass."""
        cos, sin = self._known_positions(end)
        if self._ends is None:
            weight, head = self._embedding.weight, self._head
            stored = weight.stored if is_compact(weight) else weight
            made = np.zeros(END_FIELDS, np.int64)
            made[EMBED : VOCABULARY + 1] = embedding_of(*form_of(stored)).address, stored.data_ptr(), weight.shape[0]
            made[COSINES : KNOWN + 1] = cos.data_ptr(), sin.data_ptr(), cos.shape[0]
            bias = 0 if head.bias is None else head.bias.data_ptr()
            made[NORM] = self._norm.weight.data_ptr()
            made[PROJECT : BIAS + 1] = *head.compiled_product(), head.out_features, bias
            self._ends = made
        return self._ends.copy()

    @property
    def is_usable(self) -> bool:
        """Whether the model is the recorded one, and passes may be computed for it here and now."""
        return self._unchanged() and self.stack.is_usable

    def has_own_products(self, rows: int) -> bool:
        """Whether all of a pass over trees with so many rows is in compiled code."""
        return self.stack.takes_number(rows) and self._products_are_own(rows, rows)

    def _products_are_own(self, rows: int, last: int) -> bool:
        """Whether the products of so many rows, and that of the output layer for the ``last`` of them, are our own."""
        head = self._head
        is_own = isinstance(head, SmallBatchLinear) and head.has_own_weight and head.choice.own(last)
        return is_own and self.stack.has_own_products(rows)

    def _logits_of_open(self, hidden: torch.Tensor, certain: npt.NDArray[np.int64]) -> torch.Tensor:
        """Logits that the output layer computes only for rows without a certain token."""
        rows = torch.from_numpy(np.flatnonzero(certain == OPEN))
        found = torch.full((1, len(certain), self._head.out_features), -torch.inf)
        if len(rows):
            found[0, rows] = self._head(self._normed(hidden[:, rows]))[0]
        rows = torch.from_numpy(np.flatnonzero(certain != OPEN))
        # Zero times the sum is not a number where the row overflowed, which acceptance must see.
        found[0, rows, torch.from_numpy(certain)[rows]] = 0 * hidden[0, rows].float().sum(-1)
        return found

    def _takes(self, ids: torch.Tensor, mask: object, cache: object) -> bool:
        slots, new = ids.shape
        return self._unchanged() and self.stack.takes_pass(slots, new, mask, cache)

    def _rotated(self, positions: torch.Tensor, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The cosines and sines of positions below ``end``."""
        shape = *positions.shape, -1
        cos, sin = (table.index_select(0, positions.view(-1)).view(shape) for table in self._known_positions(end))
        return cos, sin

    def _known_positions(self, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The cosines and sines of all positions below ``end``, which the model's own module has computed."""
        if self._positions[0].shape[0] < end:
            count = max(FEWEST_POSITIONS, end + end // 4)
            cos, sin = self._rotary(torch.empty(0), torch.arange(count)[None])
            self._positions, self._ends = (cos[0].contiguous(), sin[0].contiguous()), None
        return self._positions

    def _normed(self, hidden: torch.Tensor) -> torch.Tensor:
        normed = torch.empty_like(hidden)
        width = hidden.shape[-1]
        numbers = hidden.data_ptr(), hidden.numel() // width, width, self._norm.weight.data_ptr()
        norm_rows(*numbers, self.epsilon, normed.data_ptr())
        return normed


def _new_room(rows: int, outs: int, like: torch.Tensor) -> torch.Tensor:
    return like.new_empty(rows, outs)


def whole_pass_of(model: Module, stack: LayerStack) -> WholePass | None:
    """The whole passes of a model; None if it has other parts than its layers, an embedding, a norm and a head."""
    decoder = model._modules.get("model")
    if set(model._modules) != OF_MODEL or decoder is None or set(decoder._modules) != OF_DECODER:
        return None
    made = WholePass(stack, model, decoder)
    return made if made.is_known else None
