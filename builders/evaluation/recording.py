"""Recorded answers with their contexts, and an engine that replays them without a model."""

from __future__ import annotations

import time
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from threading import Lock

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from hdtool.data.chat import conversation_text, encode_text, has_chat_template
from hdtool.data.conversation import RecordedRankings
from hdtool.data.errors import PromptError, RecordError
from hdtool.data.prompts import Message
from hdtool.data.record_counts import Tally
from hdtool.data.texts_and_traces import RecordedAnswer, Trace
from hdtool.runtime.caches.slots import Cache
from hdtool.runtime.core.accept import Accepted
from hdtool.runtime.core.engine_interface import PassLog, PassOptions, Verified, WaitForResults
from hdtool.runtime.core.tree import LARGEST_TREE, ROOT, DraftTree, rows_of
from hdtool.runtime.generation.text_stream import text_of
from hdtool.runtime.model.pass_inputs import FULL, AttentionMasks, AttentionWindow
from hdtool.runtime.settings.decoding import StoresConfig
from hdtool.runtime.settings.model import ModelConfig
from hdtool.runtime.stores.store_opener import StoreOpener
from hdtool.runtime.stores.store_set import StoreSet
from hdtool.runtime.target.load import load_stops, load_tokenizer
from hdtool.runtime.weights.checkpoint_identity import checkpoint_of


@dataclass(frozen=True)
class RecordedTurn:
    """Recorded answer with its context."""

    conversation: str
    category: str
    number: int
    """Index of the answer in its conversation, from 0."""
    prompt: list[int]
    answer: list[int]
    """Token ids; the last one is a stop token, unless the answer was cut off."""
    max_tokens: int | None = None
    """Maximum length of the answer, near which the decoding loop clips draft trees; None if unknown."""
    rankings: RecordedRankings | None = None
    """Top-k tokens of the target at each position, if they were recorded."""


class TurnReader:
    """Rebuilds the contexts of recorded answers with the tokenizer of the model that wrote them."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, stops: Container[int], end: int | None, chat: bool | None = None
    ) -> None:
        self.tokenizer = tokenizer
        self._stops = stops
        self._end = end
        self._chat = has_chat_template(tokenizer) if chat is None else chat

    @classmethod
    def of_model(cls, model: ModelConfig, chat: bool | None = None) -> TurnReader:
        tokenizer = load_tokenizer(model)
        return cls(tokenizer, load_stops(model, tokenizer), tokenizer.eos_token_id, chat)

    def turns(self, trace: Trace) -> list[RecordedTurn]:
        try:
            return self._turns(trace)
        except PromptError as error:
            raise RecordError(f"{trace.where}: {error}") from None

    def usable(self, traces: Iterable[Trace], tally: Tally) -> Iterator[tuple[Trace, list[RecordedTurn]]]:
        """Yield ``(trace, turns)``; traces whose contexts cannot be rebuilt are counted in ``tally`` instead."""
        for trace in traces:
            try:
                yield trace, self._turns(trace)
            except PromptError as error:
                tally.refuse(trace.where, error)

    def _turns(self, trace: Trace) -> list[RecordedTurn]:
        return [self._turn(trace, number, answer) for number, answer in enumerate(trace.answers)]

    def _turn(self, trace: Trace, number: int, recorded: RecordedAnswer) -> RecordedTurn:
        prompt_text = conversation_text(self.tokenizer, trace.messages[: recorded.message_index], chat=self._chat)
        prompt = self._ids(prompt_text)
        if not prompt:
            raise PromptError("there is nothing before the answer: leave the conversation out")
        if recorded.ids is None:
            answer, max_tokens = self._answer(prompt_text, prompt, trace.messages[: recorded.message_index + 1]), None
        else:
            answer, max_tokens = (
                self._checked(recorded.ids, trace.messages[recorded.message_index]["content"]),
                recorded.max_tokens,
            )
        return RecordedTurn(trace.id, trace.category, number, prompt, answer, max_tokens, recorded.rankings)

    def _answer(self, prompt_text: str, prompt: list[int], messages: Sequence[Message]) -> list[int]:
        """Return the last message's token ids up to and including its first stop token, or with the EOS token appended.

        Raise a PromptError if the EOS token is needed and the tokenizer has none.
        """
        text = messages[-1]["content"]
        whole = (
            conversation_text(self.tokenizer, messages, chat=True, answered=True) if self._chat else prompt_text + text
        )
        ids = self._ids(whole)
        answer = ids[len(prompt) :]
        ended = self._ending_of(answer)
        # A template may render a past answer differently, or not mark its end.
        if ids[: len(prompt)] != prompt or (self._chat and ended is None):
            answer = encode_text(self.tokenizer, text, special=False)
            ended = self._ending_of(answer)
        if ended is not None:
            return answer[: ended + 1]
        if self._end is None:
            raise PromptError("this tokenizer knows no token that ends an answer: name a model that has one")
        return [*answer, self._end]

    def _ids(self, text: str) -> list[int]:
        return encode_text(self.tokenizer, text, special=not self._chat)

    def _ending_of(self, answer: list[int]) -> int | None:
        return next((index for index, token in enumerate(answer) if token in self._stops), None)

    def _checked(self, ids: Sequence[int], text: str) -> list[int]:
        """Return the recorded ids; raise a ``PromptError`` unless they decode to the recorded text."""
        if max(ids) >= len(self.tokenizer) or text_of(self.tokenizer, ids) != text:
            raise PromptError(
                "the ids of an answer do not spell its text with this tokenizer: name the model that answered, "
                "with --model"
            )
        return list(ids)


def open_stores(model: ModelConfig, tokenizer: PreTrainedTokenizerBase, named: StoresConfig) -> StoreSet:
    """Open the stores that the model would draft from, without loading the model."""
    return StoreOpener(model.name, tokenizer, checkpoint_of(model), named).open()


class RecordedLogits:
    """Builds a draft tree's logits from recorded rankings: a row for the root and one per node, -inf where unknown."""

    def __init__(self, turns: Iterable[RecordedTurn]) -> None:
        """Allocate logits for the largest tree; the vocabulary covers all token ids in turns that have rankings."""
        self._vocabulary = 1 + max(
            (int(max(*turn.prompt, *turn.answer, turn.rankings.tokens.max())) for turn in turns if turn.rankings),
            default=0,
        )
        self._logits = torch.full((1 + LARGEST_TREE, self._vocabulary), -torch.inf)
        self._rows = self._logits.numpy()
        self._filled = 0

    def logits_after(self, rankings: RecordedRankings, done: int, path: Sequence[int], nodes: int) -> torch.Tensor:
        """Return the logits ``[1 + nodes, vocabulary]`` of a tree that follows the first ``done`` tokens of the answer.

        Only the rows of the root and of ``path`` have finite logits. The tensor is valid until the next call.
        """
        self._rows[: self._filled] = -torch.inf
        self._filled = 1 + nodes
        for place, row in enumerate(rows_of(path), done):
            self._rows[row, rankings.tokens[place]] = rankings.logprobs[place]
        return self._logits[: self._filled]


NO_LOGITS = torch.empty(0)
NO_ARGMAX = -1
"""Argmax at positions that were not recorded; this id is in no draft tree."""


class RecordingEngine:
    """Engine that returns recorded tokens as the argmax and, if rankings were recorded too, logits built from them.

    For each pass it logs the time that building the tree's mask and positions takes on the host.
    """

    captures, changes, vocabulary = False, 0, 2**31 - 1

    def __init__(self, logits: RecordedLogits | None = None) -> None:
        self.device, self.log, self.busy = torch.device("cpu"), PassLog(), Lock()
        self.cache = self.allocate()
        self._masks = AttentionMasks([AttentionWindow(FULL)], torch.float32, self.device)
        self._logits = logits
        self._turn: RecordedTurn

    def answer(self, turn: RecordedTurn) -> None:
        """Set the turn to replay."""
        self._turn = turn

    def context_limit(self, prompt_length: int) -> int | None:
        return None

    def reads_in_pieces(self, length: int) -> bool:
        return False

    def notice_changes(self) -> None:
        pass

    def notice_silent_change(self, *, goes_on: bool) -> bool:
        return False

    def allocate(self, slots: int = 1, capacity: int = 0) -> Cache:
        return Cache((), slots, capacity)

    def prefill(self, cache: Cache, slot: int, tokens: Sequence[int], start: int = 0, *, room: int = 0) -> Verified:
        cache.slots[slot].cut(start)
        cache.slots[slot].extend(tokens, None)
        return self._verified([], self._turn.answer[:1], 0, 0)

    def launch(self, cache: Cache, trees: Sequence[DraftTree], options: Sequence[PassOptions] = ()) -> WaitForResults:
        (tree,), slot = trees, cache.slots[0]
        started, length = time.perf_counter(), slot.length
        self._masks.of_trees([tree], [length])
        (length + tree.depths).tolist()
        self.log.add(time.perf_counter() - started, len(tree))
        slot.tree = tree
        done = length + 1 - len(self._turn.prompt)
        path, tokens, _ = accept_recorded(tree, self._turn.answer[done:])
        verified = [self._verified(path, tokens, done, len(tree))]
        return lambda: verified

    def _verified(self, path: list[int], tokens: Sequence[int], done: int, nodes: int) -> Verified:
        argmax = np.full(1 + nodes, NO_ARGMAX, np.int64)
        argmax[rows_of(path)] = tokens
        logits, rankings = NO_LOGITS, self._turn.rankings
        if self._logits and rankings:
            logits = self._logits.logits_after(rankings, done, path, nodes)
        return Verified(logits, argmax=argmax, finite=np.ones_like(argmax))

    @property
    def takes_trees(self) -> bool:
        return True

    def fit_tree(self, cache: Cache, slot: int, tree: DraftTree) -> DraftTree:
        return tree

    def recompute(self, cache: Cache, slot: int, root: int) -> Verified:
        raise AssertionError("recorded logits are finite")

    def commit(self, cache: Cache, slot: int, path: Sequence[int]) -> None:
        cache.slots[slot].commit(path)

    def note_overflow(self) -> None:
        pass


def accept_recorded(tree: DraftTree, truth: Sequence[int]) -> Accepted:
    """Accept the tree's longest path that matches the recorded tokens, and the next recorded token as a bonus token."""
    path: list[int] = []
    node = ROOT
    for token in truth[:-1]:  # the last token is always the bonus token
        child = tree.child(node, token)
        if child is None:
            break
        path.append(child)
        node = child
    return Accepted(path, list(truth[: len(path) + 1]))
