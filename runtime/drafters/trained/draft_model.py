"""Draft models: small models with the target's tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch

from hdtool.data.errors import FamilyError, ModelError
from hdtool.data.stores.manifest import TokenizerFingerprint
from hdtool.runtime.caches.kv_cache import extent_for
from hdtool.runtime.core.engine_interface import Ranked, TopTokens
from hdtool.runtime.core.prefix_cache import common_prefix_length
from hdtool.runtime.core.tree import LARGEST_TREE, DraftTree
from hdtool.runtime.drafters.trained.checkpoints import loaded_once
from hdtool.runtime.drafters.trained.draft_module import MAX_PASSES, NO_RANKING, DraftModule
from hdtool.runtime.drafters.trained.module_parts import on_host, topk_tokens
from hdtool.runtime.drafters.trained.path_drafting import DEPTHS, path_drafter
from hdtool.runtime.drafters.trained.proposal import TOKENS_PER_RANKING
from hdtool.runtime.drafters.trained.proposer import TrainedProposer
from hdtool.runtime.model.pass_inputs import StepTensors, step_words
from hdtool.runtime.settings.draft_sources import SourceId
from hdtool.runtime.settings.model import ModelConfig
from hdtool.runtime.target.load import load

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hdtool.runtime.budget.trained_drafter_gate import TrainedDrafterGate
    from hdtool.runtime.target.target import Target


def draft_model_drafter(
    name: str, target: Target, tokenizer: TokenizerFingerprint | None, gate: TrainedDrafterGate | None = None
) -> TrainedProposer:
    """Return a drafter for the small model called ``name``.

    Raise ModelError if its tokenizer differs from ``tokenizer``, the target's, which is not compared if None. Raise
    FamilyError if the small model cannot verify trees.
    """
    model = loaded_once(target, name, lambda: _loaded(name, target, tokenizer))
    module = DraftModel(model, target.vocabulary)
    on_cpu = target.device.type == "cpu"  # elsewhere, a pass's time depends on the number of layers, not of weights
    module.relative_cost = model.model.num_parameters() / target.model.num_parameters() if on_cpu else 0.0
    return path_drafter(module, module.drafts_in_one_run, None, gate, source=SourceId.DRAFTER)


def _loaded(name: str, target: Target, tokenizer: TokenizerFingerprint | None) -> Target:
    config = ModelConfig(name, device=str(target.device))
    loaded = load(config)
    fingerprint = TokenizerFingerprint.of(loaded.tokenizer)
    if tokenizer is not None and fingerprint != tokenizer:
        raise ModelError(
            f"drafter {name} has another tokenizer than the model ({fingerprint.vocab_size} tokens, not "
            f"{tokenizer.vocab_size}, or others): name a small model of the same family"
        )
    if not loaded.target.takes_trees:
        raise FamilyError(
            f"drafter {name} is of type {loaded.target.config.model_type!r}, whose drafts cannot be taken back: "
            "name another small model"
        )
    return loaded.target


class DraftModel(DraftModule):
    """A small model that drafts a chain token by token; rejected tokens are rolled back from its KV cache."""

    passes = MAX_PASSES
    paths_per_pass = 1

    def __init__(self, model: Target, vocabulary: int) -> None:
        """Only the first ``vocabulary`` token ids are drafted."""
        self._model, self._vocabulary = model, vocabulary
        self._cache = model.allocate()
        self._runs = model.ranking_passes(1 + DEPTHS[-1], TOKENS_PER_RANKING)
        self.begin([])

    @property
    def drafts_in_one_run(self) -> bool:
        """True if ``start`` can draft: passes are captured, and the model keeps no states.

        A draft changes recurrent states, which only the host can roll back.
        """
        return self._model.captures and self._cache.slots[0].states is None

    def begin(self, prompt: list[int]) -> None:
        self._model.notice_changes()
        slot = self._cache.slots[0]
        if slot.version != self._model.changes:  # the slot holds keys and values of the weights before
            slot.cut(0)
            slot.version = self._model.changes
        self._context = list(prompt[:1])
        self._limit = self._model.context_limit(max(1, len(prompt)))
        """Maximum number of tokens that the model can read, after which it drafts nothing; None without a limit."""
        self._accepted = 0
        """Number of context tokens in the cache."""

    def read(self, hidden: torch.Tensor, tokens: list[int]) -> Ranked:
        self._drafted = 0
        kept = self._resumed(tokens)
        if self._is_full():
            return NO_RANKING
        slot, new = self._cache.slots[0], self._context[kept:]
        if len(new) > LARGEST_TREE or slot.length < kept or not kept:
            logits = self._model.prefill(self._cache, 0, new, kept).logits
        else:
            slot.cut(kept)
            logits = self._verified(_chain(new), new[1:])
        self._cache.slots[0].keep_states()  # for recurrent models; not ``slot``, which a growing cache replaces
        self._accepted = len(self._context)
        return on_host(self._best(logits))

    @torch.inference_mode()
    def start(self, hidden: torch.Tensor, tokens: list[int]) -> Callable[[], Ranked]:
        """Start to read accepted tokens and ``depth`` drafted ones; return a function that waits for the rankings.

        The function returns ``NO_RANKING`` if the context is full or no step was captured.
        """
        self._drafted = self.depth
        kept, captured = self._resumed(tokens), self._model.captured
        if self._is_full() or captured is None or captured.proven is None:
            return lambda: NO_RANKING
        slot, new = self._cache.slots[0], self._context[kept:]
        if len(new) > self._runs.largest or slot.length < kept or not kept:
            self._model.prefill(self._cache, 0, new[:-1], kept)
            new = new[-1:]
        else:
            slot.cut(kept)
        self._model.make_room(self._cache, 1)
        results = self._started(_chain(new))
        self._accepted = len(self._context)
        return results

    def _started(self, chain: DraftTree) -> Callable[[], Ranked]:
        """Start a run that reads a chain of accepted tokens into the cache, and drafts."""
        assert self._model.captured and self._model.captured.proven
        step, slot, storage = self._model.captured.proven, self._cache.slots[0], self._cache.storage
        self._runs.read_from(storage, step)
        rows = self._runs.size_for(1 + len(chain))
        end = slot.length + rows + self.depth
        slot.kv.mark_written(end)
        extent = min(extent_for(end), storage.capacity) if step.reads_extent else 0
        words = [*step_words(chain, rows, slot.length), len(chain)]
        rank = partial(self._rank_chain, lambda given: step.run(given, storage, extent).logits, rows)
        results = self._runs.start((f"read, {self.depth} drafted", rows, extent), words, 1 + self.depth, rank)
        slot.begin_commit(chain, None)
        slot.commit(range(len(chain)))
        return results

    def _rank_chain(
        self, logits_of: Callable[[StepTensors], torch.Tensor], rows: int, words: torch.Tensor
    ) -> TopTokens:
        """Rank the tokens after a chain and after ``depth`` drafted ones; ``words`` hold the step and its last row."""
        given, last = StepTensors.of(words[None, :-1], rows), words[-1:]
        ranked = [self._best(logits_of(given).index_select(0, last))]
        for drafted in range(1, 1 + self.depth):
            root = StepTensors.of_root(ranked[-1][0][0, :1], given.length + last + drafted)
            ranked.append(self._best(logits_of(root)))
        tokens, probs = map(torch.cat, zip(*ranked, strict=True))
        return tokens, probs

    def _resumed(self, tokens: list[int]) -> int:
        """Add accepted tokens to the context; return how many of its tokens the cache holds."""
        self._context += tokens
        if max(tokens) >= self._model.vocabulary:
            self._limit = 0  # the model has no embedding for one of the tokens
        slot = self._cache.slots[0]
        return self._accepted or slot.resumes_at(
            min(common_prefix_length(slot.tokens, self._context), len(self._context) - 1)
        )

    def extend(self, parents: list[int], tokens: list[int]) -> Ranked:
        (token,) = tokens
        self._drafted += 1
        if self._is_full():
            return NO_RANKING
        return on_host(self._best(self._verified(DraftTree.bare(token), ())))

    def _is_full(self) -> bool:
        return self._limit is not None and len(self._context) + self._drafted > self._limit

    def _verified(self, tree: DraftTree, path: Sequence[int]) -> torch.Tensor:
        """Read a chain of tokens into the cache, and commit its ``path``; return the logits after the last token."""
        (verified,) = self._model.verify(self._cache, [tree])
        logits = verified.logits[-1:]
        self._model.commit(self._cache, 0, range(len(path)))
        return logits

    def _best(self, logits: torch.Tensor) -> TopTokens:
        return topk_tokens(logits[:, : self._vocabulary], TOKENS_PER_RANKING)


def _chain(tokens: list[int]) -> DraftTree:
    return DraftTree.of(tokens[0], tokens[1:], range(-1, len(tokens) - 2))
