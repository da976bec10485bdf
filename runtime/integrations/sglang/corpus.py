"""Draft trees for the requests of an SGLang batch, in the interface of SGLang's n-gram corpus.

SGLang verifies the same number of nodes for every request, the last token of its context among them as the root.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn

import numpy as np
import numpy.typing as npt
import torch

from hdtool.data.errors import StoreError
from hdtool.runtime.accept import Accepted
from hdtool.runtime.drafter import Drafter, HistoryDrafter, draft_many
from hdtool.runtime.tree import DraftTree
from hdtool.runtime.verified import Verified

PADDING = 0
"""The token of nodes that nothing was drafted for; it is verified below the root, as any other."""
NO_CORPORA = (
    "hdtool drafts from stores of its own, not from external corpora: build one with hdtool build-corpus-db and "
    "restart the server"
)


class HierarchyCorpus:
    """A drafter for each request; requests share the stores and the history."""

    def __init__(self, make: Callable[[], Drafter], nodes: int, vocabulary: int) -> None:
        """``make`` makes a drafter; trees have so many ``nodes``, with the root, and tokens below ``vocabulary``."""
        self._make, self._nodes, self._vocabulary = make, nodes, vocabulary
        self._requests: dict[str, _Request] = {}
        self._free = [make()]  # compiled now, so that no request waits for it

    def __contains__(self, request: str) -> bool:
        return request in self._requests

    def begin(self, request: str, context: Sequence[int]) -> None:
        """Draft for a request from the whole of its context from now on; other requests begin with their tail."""
        self._begin(request, context, len(context))

    def batch_get(
        self, req_ids: Sequence[str], batch_tokens: Sequence[Sequence[int]], total_lens: Sequence[int]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The tokens of a tree for each request, and for each of its nodes a mask of itself and its ancestors.

        ``batch_tokens`` are the last tokens of contexts with these total lengths.
        """
        requests = []
        for name, tail, total in zip(req_ids, batch_tokens, total_lens, strict=True):
            request = self._requests.get(name)
            if request is None or not 0 <= total - request.total <= len(tail):
                request = self._begin(name, tail[:-1], total - 1)
            request.extend(tail[len(tail) - (total - request.total) :])
            requests.append(request)
        tokens = np.full((len(requests), self._nodes), PADDING, np.int64)
        masks = np.zeros((len(requests), self._nodes, self._nodes), np.int64)
        masks[:, :, 0] = 1
        masks[:, np.arange(self._nodes), np.arange(self._nodes)] = 1
        drafters, contexts = [one.drafter for one in requests], [one.context for one in requests]
        for row, tree in enumerate(draft_many(drafters, contexts) if requests else []):
            drafted = self._fitted(tree)
            rows = len(drafted) + 1
            tokens[row, :rows] = drafted.all_tokens
            masks[row, :rows, :rows] = drafted.ancestor_mask
        return tokens.ravel(), masks.ravel()

    def batch_put(self, batch_tokens: Sequence[Sequence[int]]) -> None:
        """Nothing: ``batch_get`` has learned these tokens."""

    def synchronize(self) -> None:
        """Nothing runs in the background."""

    def finish(self, request: str, context: Sequence[int]) -> None:
        """End an answer, whose tokens are known to the last."""
        if running := self._requests.get(request):
            running.extend(context[running.total :])
            self.erase_match_state([request])

    def erase_match_state(self, req_ids: Iterable[str]) -> None:
        """End the answers of requests that have left the batch; they begin anew if they return."""
        for name in req_ids:
            if request := self._requests.pop(name, None):
                if isinstance(request.drafter, HistoryDrafter):
                    request.drafter.end()
                self._free.append(request.drafter)

    def reset(self) -> None:
        """End all answers. Stores and history are kept, as they stay valid when SGLang flushes its cache."""
        self.erase_match_state(list(self._requests))

    def load_external_corpus_named(self, corpus_id: str, chunks: Iterable[Sequence[int]]) -> NoReturn:
        """Refuse a corpus of SGLang's."""
        raise StoreError(NO_CORPORA)

    def remove_external_corpus(self, corpus_id: str) -> NoReturn:
        """Refuse a corpus of SGLang's."""
        raise StoreError(NO_CORPORA)

    def list_external_corpora(self) -> dict[str, int]:
        """There are none."""
        return {}

    def _begin(self, name: str, context: Sequence[int], total: int) -> _Request:
        self.erase_match_state([name])
        request = _Request(self._free.pop() if self._free else self._make(), list(context), total)
        request.drafter.begin(request.context)
        self._requests[name] = request
        return request

    def _fitted(self, tree: DraftTree) -> DraftTree:
        return tree.picked(np.arange(min(len(tree), self._nodes - 1))).embeddable(self._vocabulary)


class _Request:
    """A request: its drafter, and the end of its context, as far as it is known."""

    def __init__(self, drafter: Drafter, context: list[int], total: int) -> None:
        self.drafter, self.context, self.total = drafter, context, total

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens that the target has emitted."""
        if tokens:
            self.context.extend(tokens)
            self.total += len(tokens)
            self.drafter.observe(Accepted([], list(tokens)), _NOT_ON_THE_HOST)


_NOT_ON_THE_HOST = Verified(torch.empty(0, 1))
