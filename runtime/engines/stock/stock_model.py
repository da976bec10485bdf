"""A stock ``transformers`` model: how its own code is called, and what follows from its configuration."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import Cache as LibraryCache

from hdtool.runtime.core.engine_interface import PassLog
from hdtool.runtime.model.devices import device_of
from hdtool.runtime.model.hidden_states import HiddenStates
from hdtool.runtime.model.pass_inputs import AttentionMask, AttentionMasks, windows_of
from hdtool.runtime.model.quantization import RowByRow
from hdtool.runtime.model.transformers_internals import cache_name, last_logits_of_all_rows, last_logits_only, takes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NO_CONTEXT = nullcontext()


class StockModel:
    """Runs and times passes of a model's own code."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.config = model.config.get_text_config(decoder=True)
        self.device, self.dtype = device_of(model), model.dtype
        self.log = PassLog()
        self.windows = windows_of(self.config)
        self.masks = AttentionMasks(self.windows, self.dtype, self.device)
        self.last_only = last_logits_only(model)
        """Option that makes a pass compute only the last token's logits."""
        self.last_of_all = last_logits_of_all_rows(model)
        """Option like ``last_only`` for passes that record hidden states: no layer skips tokens."""
        self.row_by_row = RowByRow(model)
        self.hidden = HiddenStates()
        self.cache_name = cache_name(model) or ""
        """Name of the cache argument, read once because a wrapper of ``forward`` need not name its arguments."""
        self.takes_positions, self.takes_mask = takes(model, "position_ids"), takes(model, "attention_mask")

    def forward(
        self,
        tokens: list[list[int]],
        positions: Sequence[Sequence[int]],
        mask: AttentionMask,
        cache: LibraryCache,
        **options: Any,
    ) -> torch.Tensor:
        """Run a pass over lists of token ids; return logits ``[batch, tokens, vocabulary]``."""
        ids = torch.tensor(tokens, device=self.device)
        output = self.call(ids, torch.tensor(positions, device=self.device), mask, cache, **options)
        logits: torch.Tensor = output.logits
        return logits

    def call(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        mask: AttentionMask,
        cache: LibraryCache | None,
        **options: Any,
    ) -> Any:
        """Run and time a pass over token ids on the model's device; return the model's output."""
        with self.row_by_row.on() if self.row_by_row.layers and mask is not None else NO_CONTEXT:
            self._synchronize()  # a captured step may still run, which the time of this pass should not include
            started = time.perf_counter()
            options_: dict[str, Any] = {self.cache_name: cache, "use_cache": True, "return_dict": True, **options}
            if self.takes_positions:
                options_["position_ids"] = positions
            output = self.model(input_ids=ids, attention_mask=mask, **options_)
            self._synchronize()
            self.log.add(time.perf_counter() - started)
        return output

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def embedded_tokens(model: PreTrainedModel) -> int:
    """Return the number of token embeddings; a tokenizer may have more ids."""
    number = getattr(model.get_input_embeddings(), "num_embeddings", None)
    return int(number or model.config.get_text_config(decoder=True).vocab_size)
