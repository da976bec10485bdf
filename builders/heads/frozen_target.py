"""The frozen target model that heads are trained on."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from hdtool.data.errors import ModelError
from hdtool.runtime.model.hidden_states import hidden_in, module_of_hidden
from hdtool.runtime.model.target import Target

PROBE_TOKENS = 4


class TargetOutput(NamedTuple):
    """Outputs of the target at every token of a batch."""

    hidden: torch.Tensor
    embedded: torch.Tensor
    """The embedding of the next token; arbitrary in the last column."""
    logits: torch.Tensor | None = None
    """The logits, where the output layer alone does not give them."""


class FrozenTarget:
    """A target without gradients that returns its hidden states, and its logits where they are asked for.

    Most models compute logits by their output layer alone. It then runs only for the positions and the tokens that
    the loss reads. Models that scale or cap logits afterwards compute all of them.
    """

    def __init__(self, target: Target) -> None:
        self.model: PreTrainedModel = target.model
        self.device = target.device
        self.model.requires_grad_(False)
        ids = torch.arange(PROBE_TOKENS, dtype=torch.int64, device=self.device)[None]
        kind = self.model.config.model_type
        self._decoder = module_of_hidden(self.model, kind, lambda: self._all_logits(ids))
        self._output: Any = self.model.get_output_embeddings()
        logits, hidden = self._both(ids)
        self.hidden_width = int(hidden.shape[-1])
        self.vocabulary = int(logits.shape[-1])
        self.has_plain_output = self._gives(ids, hidden, logits)

    @torch.no_grad()
    def read(self, ids: torch.Tensor) -> TargetOutput:
        embedded = self.embed_next(ids)
        if self.has_plain_output:
            hidden = hidden_in(self._decoder(input_ids=ids, use_cache=False))
            assert hidden is not None
            return TargetOutput(hidden, embedded)
        logits, hidden = self._both(ids)
        return TargetOutput(hidden, embedded, logits)

    @torch.no_grad()
    def embed_next(self, ids: torch.Tensor) -> torch.Tensor:
        embedded: torch.Tensor = self.model.get_input_embeddings()(ids.roll(-1, dims=1))
        return embedded

    @torch.no_grad()
    def logits_at(
        self, output: TargetOutput, rows: torch.Tensor, columns: torch.Tensor, token_ids: torch.Tensor | None
    ) -> torch.Tensor:
        """The logits ``[positions, tokens]`` at some positions, of all tokens or of a draft vocabulary."""
        if output.logits is not None:
            logits = output.logits[rows, columns]
            logits = logits if token_ids is None else logits[:, token_ids]
        else:
            logits = self._product(output.hidden[rows, columns], token_ids)
        if not logits.isfinite().all():
            raise ModelError("the model's logits are not finite: heads cannot be trained on it; try --dtype float32")
        return logits

    def _product(self, hidden: torch.Tensor, token_ids: torch.Tensor | None) -> torch.Tensor:
        hidden = hidden.to(self._output.weight.dtype)
        if token_ids is None:
            logits: torch.Tensor = self._output(hidden)
            return logits
        bias = getattr(self._output, "bias", None)
        weight = self._output.weight[token_ids]
        return torch.nn.functional.linear(hidden, weight, None if bias is None else bias[token_ids])

    def _all_logits(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(input_ids=ids, use_cache=False).logits
        return logits

    def _both(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits and hidden states of one pass."""
        found: list[torch.Tensor] = []

        def record(_: torch.nn.Module, __: object, returned: object) -> None:
            if (hidden := hidden_in(returned)) is not None:
                found.append(hidden)

        handle = self._decoder.register_forward_hook(record)
        try:
            with torch.no_grad():
                return self._all_logits(ids), found[-1]
        finally:
            handle.remove()

    @torch.no_grad()
    def _gives(self, ids: torch.Tensor, hidden: torch.Tensor, logits: torch.Tensor) -> bool:
        """Whether the decoder alone returns these hidden states, and the output layer alone these logits."""
        weight = getattr(self._output, "weight", None)
        if not isinstance(weight, torch.Tensor) or not weight.is_floating_point():
            return False
        if weight.shape != (logits.shape[-1], hidden.shape[-1]):
            return False
        try:
            again = hidden_in(self._decoder(input_ids=ids, use_cache=False))
        except (TypeError, ValueError):  # a decoder that takes other arguments
            return False
        if again is None or not torch.equal(again, hidden):
            return False
        return torch.equal(self._product(hidden, None).float(), logits.float())
