"""Training examples of heads: token ids, each marked as written by the model or not, in batches of similar length.

A draft vocabulary restricts the output layers, as in EAGLE-3 (arXiv:2503.01840) and FR-Spec (arXiv:2502.14856).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from hdtool.builders.evaluation.recording import TurnReader
from hdtool.data.chat import encode_text
from hdtool.data.conversation import Conversation
from hdtool.data.conversation_files import ConversationReader
from hdtool.data.errors import RecordError
from hdtool.data.progress import ProgressBar
from hdtool.data.texts_and_traces import RecordedAnswer, Trace
from hdtool.runtime.settings.building import HeadsConfig, TrainConfig

MIN_TOKENS = 3
"""Minimum number of tokens of an example; the first head predicts the third token of a text."""


@dataclass(frozen=True)
class Example:
    """Tokens of a training text, at most one window long."""

    ids: npt.NDArray[np.int64]
    drafted: npt.NDArray[np.bool_]
    """True for each token that the model wrote, and for all of plain text. Heads learn to predict only such tokens."""


def read_examples(reading: ConversationReader, turns: TurnReader, window: int, progress: ProgressBar) -> list[Example]:
    """Split all records into examples of at most ``window`` tokens; raise a ``RecordError`` if none is usable."""
    examples: list[Example] = []
    max_length = 0
    for located in reading.conversations():
        for whole in _whole_examples(located.conversation, turns):
            max_length = max(max_length, len(whole.ids))
            examples += _windows(whole, window)
        progress.to(reading.bytes_read)
    if not examples:
        raise RecordError(
            f"no examples: the longest text has {max_length} tokens, and heads need {MIN_TOKENS} at least "
            f"and an answer of the model among them; name more text"
        )
    return examples


def _whole_examples(conversation: Conversation, turns: TurnReader) -> Iterator[Example]:
    # Answers that a request repeats do not count as written by the model.
    said = [
        (turn, turn.by_model and place >= conversation.prompted)
        for place, turn in enumerate(conversation.turns)
        if turn.text.strip()
    ]
    if all(by_model for _, by_model in said):
        for turn, _ in said:
            ids = turn.ids or encode_text(turns.tokenizer, turn.text, special=True)
            yield Example(np.array(ids, np.int64), np.ones(len(ids), np.bool_))
        return
    messages = tuple({"role": turn.role, "content": turn.text} for turn, _ in said)
    answers = [
        RecordedAnswer(place, turn.ids, len(turn.ids) if turn.ids else None)
        for place, (turn, by_model) in enumerate(said)
        if by_model and place
    ]
    try:
        yield from _conversation_examples(Trace("", "", messages, tuple(answers), "a conversation"), turns)
    except RecordError:
        if any(turn.ids for turn, _ in said):
            raise
        # Templates may refuse roles that do not alternate: use the texts without the template.
        for turn, by_model in said:
            ids = encode_text(turns.tokenizer, turn.text, special=True)
            yield Example(np.array(ids, np.int64), np.full(len(ids), by_model))


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
