"""The loss of drafting heads: frozen target, labels, and a chunked cross-entropy.

The loss compares the heads with the target's probabilities and with the text. The logits of a head and their gradients
are computed chunk by chunk in the forward pass, so that they are never all in memory at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from hdtool.builders.head_training.training_examples import Example
from hdtool.data.errors import ModelError
from hdtool.runtime.drafters.heads.modules import Heads
from hdtool.runtime.model.hidden_states import hidden_in, module_of_hidden
from hdtool.runtime.target.target import Target

CHUNK_BYTES = 32 * 2**20
"""Size of a chunk's float32 logits in bytes."""


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        states: torch.Tensor,
        weight: torch.Tensor,
        probs: torch.Tensor,
        rows: torch.Tensor,
        labels: torch.Tensor,
        lm_weight: float,
        bias: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        half = torch.is_autocast_enabled(states.device.type)
        dtype = torch.get_autocast_dtype(states.device.type) if half else weight.dtype
        inputs, factors = states.to(dtype), weight.to(dtype)
        state_gradient = torch.zeros_like(inputs)
        weight_gradient = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        total = torch.zeros((), device=states.device)
        correct = torch.zeros((), dtype=torch.int64, device=states.device)
        size = max(1, CHUNK_BYTES // (4 * len(weight)))
        for start in range(0, len(states), size):
            part = slice(start, start + size)
            logits = (inputs[part] @ factors.T).float()
            if bias is not None:
                logits += bias
            truth, label = probs[rows[part]], labels[part, None]
            correct += (logits.argmax(-1, keepdim=True) == label).sum()
            norm = logits.logsumexp(-1, keepdim=True)
            total += (norm - (truth * logits).sum(-1, keepdim=True)).sum()
            total += lm_weight * (norm - logits.gather(-1, label)).sum()
            gradient = logits.sub_(norm).exp_().mul_(1 + lm_weight).sub_(truth)
            gradient.scatter_add_(-1, label, torch.full_like(norm, -lm_weight))
            narrow = gradient.to(dtype)
            state_gradient[part] = narrow @ factors
            if weight_gradient is not None:
                weight_gradient += narrow.T @ inputs[part]
        ctx.save_for_backward(state_gradient.to(states.dtype), weight_gradient)
        ctx.mark_non_differentiable(correct)
        return total, correct

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        states, weight = ctx.saved_tensors
        return states * gradients[0], None if weight is None else weight * gradients[0], *[None] * 5


cross_entropy: Callable[..., tuple[torch.Tensor, torch.Tensor]] = _CrossEntropy.apply
"""Return ``(loss, correct)``: the summed loss of ``states @ weight.T``, and how many labels equal the argmax.

The arguments are those of ``_CrossEntropy.forward``. The loss of a state is the cross-entropy to its row of ``probs``,
plus ``lm_weight`` times the cross-entropy to its label. ``bias`` is added to the logits and gets no gradient.
"""


def takes_bfloat16(device: torch.device) -> bool:
    """Return True if the device has native bfloat16 matmuls."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    supported = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    return bool(device.type == "cpu" and supported and supported())


def autocast(device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, torch.bfloat16, enabled=takes_bfloat16(device))


PROBE_TOKENS = 4


class TargetOutput(NamedTuple):
    """Outputs of the target at every position of a batch."""

    hidden: torch.Tensor
    embedded: torch.Tensor
    """Embedding of the next token; arbitrary in the last column."""
    logits: torch.Tensor | None = None
    """Logits, or None if the output layer alone computes them from ``hidden``."""


class FrozenTarget:
    """Target model with frozen weights that computes hidden states at all positions and logits at selected ones.

    If the output layer alone computes the model's logits, it runs only for the positions and tokens that the loss
    needs. Otherwise, as when the model caps its logits, the whole model computes the logits of all tokens.
    """

    def __init__(self, target: Target) -> None:
        self.model: PreTrainedModel = target.model
        self.device = target.device
        self.model.requires_grad_(False)
        ids = torch.arange(PROBE_TOKENS, dtype=torch.int64, device=self.device)[None]
        kind = self.model.config.model_type
        self._decoder = module_of_hidden(self.model, kind, lambda: self._all_logits(ids))
        self._output: Any = self.model.get_output_embeddings()
        logits, hidden = self._logits_and_hidden(ids)
        self.hidden_width = int(hidden.shape[-1])
        self.vocabulary = int(logits.shape[-1])
        self.has_plain_output = self._is_reproduced_by_parts(ids, hidden, logits)

    @torch.no_grad()
    def read(self, ids: torch.Tensor) -> TargetOutput:
        embedded = self.embed_next(ids)
        if self.has_plain_output:
            hidden = hidden_in(self._decoder(input_ids=ids, use_cache=False))
            assert hidden is not None
            return TargetOutput(hidden, embedded)
        logits, hidden = self._logits_and_hidden(ids)
        return TargetOutput(hidden, embedded, logits)

    @torch.no_grad()
    def embed_next(self, ids: torch.Tensor) -> torch.Tensor:
        embedded: torch.Tensor = self.model.get_input_embeddings()(ids.roll(-1, dims=1))
        return embedded

    @torch.no_grad()
    def logits_at(
        self, output: TargetOutput, rows: torch.Tensor, columns: torch.Tensor, token_ids: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the logits ``[positions, tokens]`` at the given positions.

        ``token_ids`` selects the tokens of a draft vocabulary; None selects all. Raise a ``ModelError`` if a logit is
        not finite.
        """
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

    def _logits_and_hidden(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the logits and the hidden states of one forward pass."""
        hidden_states: list[torch.Tensor] = []

        def record(_: torch.nn.Module, __: object, returned: object) -> None:
            if (hidden := hidden_in(returned)) is not None:
                hidden_states.append(hidden)

        handle = self._decoder.register_forward_hook(record)
        try:
            with torch.no_grad():
                return self._all_logits(ids), hidden_states[-1]
        finally:
            handle.remove()

    @torch.no_grad()
    def _is_reproduced_by_parts(self, ids: torch.Tensor, hidden: torch.Tensor, logits: torch.Tensor) -> bool:
        """Return True if the decoder and the output layer, run separately, reproduce these hidden states and logits."""
        weight = getattr(self._output, "weight", None)
        if not isinstance(weight, torch.Tensor) or not weight.is_floating_point():
            return False
        if weight.shape != (logits.shape[-1], hidden.shape[-1]):
            return False
        try:
            again = hidden_in(self._decoder(input_ids=ids, use_cache=False))
        except (TypeError, ValueError):  # the decoder takes other arguments
            return False
        if again is None or not torch.equal(again, hidden):
            return False
        return torch.equal(self._product(hidden, None).float(), logits.float())


class Batch(NamedTuple):
    """Examples of one forward pass, right-padded; causal attention never attends to the padding."""

    ids: torch.Tensor
    drafted: torch.Tensor
    """True for each token that the heads learn to predict, as in ``Example``; False for padding."""

    @classmethod
    def of(cls, examples: Sequence[Example], device: torch.device) -> Batch:
        ids = pad_sequence([torch.from_numpy(example.ids) for example in examples], batch_first=True)
        drafted = pad_sequence([torch.from_numpy(example.drafted) for example in examples], batch_first=True)
        return cls(ids.to(device), drafted.to(device))


class LabelPositions(NamedTuple):
    """Positions of a batch at which heads are trained."""

    rows: torch.Tensor
    columns: torch.Tensor
    has_label: torch.Tensor
    """``[heads, positions]``; True where the head has a label."""


def label_positions(batch: Batch, heads: int) -> LabelPositions:
    """Return the positions where at least one head has a label.

    At column t, the first head predicts the token at t + 2, the second one the token at t + 3, and so on.
    """
    length = batch.drafted.shape[1]
    padded = functional.pad(batch.drafted, (0, heads + 2))
    has_label = torch.stack([padded[:, ahead : ahead + length] for ahead in range(2, heads + 2)])
    rows, columns = has_label.any(dim=0).nonzero(as_tuple=True)
    return LabelPositions(rows, columns, has_label[:, rows, columns])


def head_labels(batch: Batch, positions: LabelPositions) -> torch.Tensor:
    """Return the token ids to predict, ``[heads, positions]``; arbitrary where a head has no label."""
    last = batch.ids.shape[1] - 1
    ahead = torch.arange(2, len(positions.has_label) + 2, device=batch.ids.device)[:, None]
    return batch.ids[positions.rows, (positions.columns + ahead).clamp_max(last)]


def head_logits(heads: Heads, hidden: torch.Tensor, embedded: torch.Tensor, positions: LabelPositions) -> torch.Tensor:
    """Return the logits ``[heads, positions, tokens]``, given hidden states and embeddings of the next tokens."""
    return heads.logits(heads.along(hidden, embedded, positions.rows, positions.columns))


def draft_labels(heads: Heads, labels: torch.Tensor) -> torch.Tensor:
    """Map token ids to indices in the draft vocabulary; -1 for tokens outside it."""
    if heads.token_ids is None:
        return labels
    indices = labels.new_full((heads.shape.vocabulary,), -1)
    indices[heads.token_ids] = torch.arange(heads.vocabulary, device=labels.device)
    return indices[labels]


class TargetProbs(NamedTuple):
    """Target's probabilities over the draft vocabulary, at positions whose next token is the label of some head."""

    probs: torch.Tensor
    """``[positions, tokens]``; each position is computed once and shared by all heads that predict its token."""
    row_of: torch.Tensor
    """``[batch, tokens]``: row of ``probs`` for each position; 0 at positions without a row."""

    @classmethod
    def of(cls, target: FrozenTarget, output: TargetOutput, batch: Batch, heads: Heads) -> TargetProbs:
        is_read = functional.pad(batch.drafted[:, 2:], (1, 1))
        rows, columns = is_read.nonzero(as_tuple=True)
        row_of = torch.zeros_like(batch.ids)
        row_of[rows, columns] = torch.arange(len(rows), device=rows.device)
        logits = target.logits_at(output, rows, columns, heads.token_ids)
        return cls(logits.softmax(-1, dtype=torch.float32), row_of)


class HeadsLoss(torch.nn.Module):
    """Loss of the heads, as a module so that ``accelerate`` can wrap it."""

    def __init__(self, heads: Heads, lm_weight: float) -> None:
        super().__init__()
        self.heads = heads
        self._lm_weight = lm_weight

    def forward(
        self, batch: Batch, positions: LabelPositions, hidden: torch.Tensor, embedded: torch.Tensor, target: TargetProbs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the loss summed over all labels, and per head the number of labels that equal its argmax.

        Labels outside the draft vocabulary add no loss, because the heads cannot predict them.
        """
        labels = draft_labels(self.heads, head_labels(batch, positions))
        states = self.heads.along(hidden, embedded, positions.rows, positions.columns)
        total = states.new_zeros((), dtype=torch.float32)
        hits = []
        last = batch.ids.shape[1] - 1
        for head, is_labelled in enumerate(positions.has_label & (labels >= 0)):
            output = self.heads.output(head)
            rows = target.row_of[positions.rows, (positions.columns + head + 1).clamp_max(last)][is_labelled]
            narrowed, own = output.narrowed(states[is_labelled, head]), labels[head][is_labelled]
            loss, correct = cross_entropy(
                narrowed, output.up.weight, target.probs, rows, own, self._lm_weight, output.up.bias
            )
            total = total + loss
            hits.append(correct)
        return total, torch.stack(hits)
