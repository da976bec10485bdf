"""Training examples and the loss of drafting heads: frozen target, batches, labels, and a chunked cross-entropy.

Examples are token ids, each marked as written by the model or not. The loss compares the heads with the target's
probabilities and with the text. A draft vocabulary restricts the output layers, as in EAGLE-3 (arXiv:2503.01840) and
FR-Spec (arXiv:2502.14856). The logits of a head and their gradients are computed chunk by chunk in the forward pass, so
that they are never all in memory at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from hdtool.builders.evaluation.recording import TurnReader
from hdtool.data.chat import encode_text
from hdtool.data.errors import ModelError, RecordError
from hdtool.data.progress import ProgressBar
from hdtool.data.texts_and_traces import Record, RecordedAnswer, RecordReader, Trace
from hdtool.runtime.config import HeadsConfig, TrainConfig
from hdtool.runtime.drafters.heads.modules import Heads
from hdtool.runtime.model.families import hidden_in, module_of_hidden
from hdtool.runtime.target.target import Target

MIN_TOKENS = 3
"""Minimum number of tokens of an example; the first head predicts the third token of a text."""


@dataclass(frozen=True)
class Example:
    """Tokens of a training text, at most one window long."""

    ids: npt.NDArray[np.int64]
    drafted: npt.NDArray[np.bool_]
    """True for each token that the model wrote, and for all of plain text. Heads learn to predict only such tokens."""


def read_examples(reading: RecordReader, turns: TurnReader, window: int, progress: ProgressBar) -> list[Example]:
    """Return all records as examples of at most ``window`` tokens; raise a ``RecordError`` if there are no examples."""
    examples: list[Example] = []
    max_length = 0
    for record in reading.whole_records():
        for whole in _record_examples(record, turns):
            max_length = max(max_length, len(whole.ids))
            examples += _windows(whole, window)
        progress.to(reading.bytes_read)
    if not examples:
        raise RecordError(
            f"no examples: the longest text has {max_length} tokens, and heads need {MIN_TOKENS} at least "
            f"and an answer of the model among them; name more text"
        )
    return examples


def _record_examples(record: Record, turns: TurnReader) -> Iterator[Example]:
    if all(part.by_model for part in record.parts):
        for part in record.parts:
            ids = part.ids or encode_text(turns.tokenizer, part.text, special=True)
            yield Example(np.array(ids, np.int64), np.ones(len(ids), np.bool_))
        return
    messages = tuple(
        {"role": "assistant" if part.by_model else part.role, "content": part.text} for part in record.parts
    )
    answers = [
        RecordedAnswer(place, part.ids, len(part.ids) if part.ids else None)
        for place, part in enumerate(record.parts)
        if part.by_model and place
    ]
    try:
        yield from _conversation_examples(Trace("", "", messages, tuple(answers), "a conversation"), turns)
    except RecordError:
        if any(part.ids for part in record.parts):
            raise
        # Templates may refuse roles that do not alternate: use the texts without the template.
        for part in record.parts:
            ids = encode_text(turns.tokenizer, part.text, special=True)
            yield Example(np.array(ids, np.int64), np.full(len(ids), part.by_model))


def _conversation_examples(trace: Trace, turns: TurnReader) -> Iterator[Example]:
    """Yield one example per run of turns in which each prompt extends the turn before; no token is trained on twice."""
    ids: list[int] = []
    drafted: list[bool] = []
    for turn in turns.turns(trace):
        if turn.prompt[: len(ids)] != ids:
            yield Example(np.array(ids, np.int64), np.array(drafted, np.bool_))
            ids, drafted = [], []
        drafted += [False] * (len(turn.prompt) - len(ids)) + [True] * len(turn.answer)
        ids = turn.prompt + turn.answer
    if ids:
        yield Example(np.array(ids, np.int64), np.array(drafted, np.bool_))


def _windows(example: Example, window: int) -> Iterator[Example]:
    for start in range(0, len(example.ids), window):
        ids, drafted = example.ids[start : start + window], example.drafted[start : start + window]
        if len(ids) >= MIN_TOKENS and drafted[2:].any():
            yield Example(ids, drafted)


SORTED_BATCHES = 16
"""Number of batches whose examples are sorted by length together, to reduce padding."""


class BatchSampler:
    """Splits examples into training and validation sets, and draws training batches deterministically by step."""

    def __init__(self, examples: Sequence[Example], config: TrainConfig) -> None:
        order = np.random.default_rng((config.seed, len(examples))).permutation(len(examples))
        count = min(max(1, round(config.val_fraction * len(examples))), len(examples) - 1)
        self.validation = [examples[place] for place in sorted(order[:count])] or list(examples)
        self.train = [examples[place] for place in sorted(order[count:])]
        self._seed = config.seed
        self._batch = min(config.batch, len(self.train))
        self._batches = -(-len(self.train) // self._batch)
        self.steps = max(1, round(config.epochs * self._batches))
        self._epoch, self._order = 0, self._shuffled_batches(0)

    @property
    def tokens(self) -> int:
        """Number of training tokens per epoch."""
        return sum(len(example.ids) for example in self.train)

    def step(self, number: int) -> list[Example]:
        """Return the batch of a step; examples are repeated to fill the last batch of an epoch."""
        epoch, batch = divmod(number, self._batches)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self._shuffled_batches(epoch)
        return [self.train[batch] for batch in self._order[batch]]

    def _shuffled_batches(self, epoch: int) -> list[list[int]]:
        random = np.random.default_rng((self._seed, epoch, 1))
        order = random.permutation(len(self.train))
        order = np.resize(order, self._batches * self._batch)
        chunk = SORTED_BATCHES * self._batch
        batches: list[list[int]] = []
        for start in range(0, len(order), chunk):
            part = sorted(order[start : start + chunk].tolist(), key=lambda index: len(self.train[index].ids))
            batches += [part[first : first + self._batch] for first in range(0, len(part), self._batch)]
        return [batches[index] for index in random.permutation(len(batches))]


def draft_vocabulary(
    config: HeadsConfig, examples: Sequence[Example], vocabulary: int
) -> tuple[HeadsConfig, npt.NDArray[np.int64] | None]:
    """Return ``(config, token_ids)``, where ``token_ids`` are the tokens of the draft vocabulary.

    If ``config`` sets no draft vocabulary, or one that would hold all tokens, the setting is cleared and the ids are
    None.
    """
    if config.draft_vocabulary is None or config.draft_vocabulary >= vocabulary:
        return replace(config, draft_vocabulary=None), None
    return config, frequent_tokens(examples, config.draft_vocabulary, vocabulary)


def frequent_tokens(examples: Sequence[Example], number: int, vocabulary: int) -> npt.NDArray[np.int64]:
    """Return the sorted ids of the ``number`` tokens that the model wrote most often; ties prefer lower ids."""
    counts = np.zeros(vocabulary, np.int64)
    for example in examples:
        np.add.at(counts, example.ids[example.drafted], 1)
    return np.sort(np.argsort(-counts, kind="stable")[:number])


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

Takes the arguments of ``_CrossEntropy.forward``. The loss of a state is the cross-entropy to its row of ``probs``, plus
``lm_weight`` times the cross-entropy to its label. ``bias`` is added to the logits and gets no gradient.
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
    needs. If the model scales or caps logits afterwards, the whole model computes the logits of all tokens.
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

        ``token_ids`` selects the tokens of a draft vocabulary; None selects all. Raises a ``ModelError`` if a logit is
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
    """True for each token that the model wrote; False for padding."""

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
    """``[batch, tokens]``: row of ``probs`` for each position."""

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
