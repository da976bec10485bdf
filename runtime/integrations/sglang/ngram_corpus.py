"""Drafts trees for SGLang's n-gram worker, in place of the worker's corpus, and reads hdtool's settings.

SGLang verifies trees of equal size for all requests of a batch; the root of a tree is the last token of the request's
context.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hdtool.data.errors import OptionError
from hdtool.runtime.budget.min_probability import NO_DRAFT_ABOVE, MinProbability
from hdtool.runtime.budget.node_budget import Budget
from hdtool.runtime.core.accept import Accepted
from hdtool.runtime.core.acceptance_rates import Probs
from hdtool.runtime.core.drafter import Drafter, draft_many
from hdtool.runtime.core.engine_interface import Verified
from hdtool.runtime.core.tree import DraftTree
from hdtool.runtime.drafters.drafter_factory import drafter_with_budget
from hdtool.runtime.integrations.served_model import opener_for_served
from hdtool.runtime.settings.decoding import DecodeConfig, StoresConfig

LOGGER = logging.getLogger("sglang.hdtool")
SETTINGS_VARIABLE = "HDTOOL_SGLANG"
TEXT_FIELDS = ("sources", "history")
DRAFTING_FIELDS = (*TEXT_FIELDS, "history_prompts")
STORE_FIELDS = tuple(one.name for one in fields(StoresConfig))
HOST_SOURCES = "context,history,model,corpus"
"""Default sources, which need neither logits nor hidden states: SGLang keeps those on the device."""


@dataclass(frozen=True)
class SglangSettings:
    """The sources and stores to draft from."""

    decoding: DecodeConfig
    stores: StoresConfig = field(default_factory=StoresConfig)

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> SglangSettings:
        """Read the settings from the environment; raise OptionError if they are invalid."""
        text = environment.get(SETTINGS_VARIABLE) or "{}"
        known = ", ".join((*STORE_FIELDS, *DRAFTING_FIELDS))
        try:
            values: Any = json.loads(text)
        except ValueError:
            values = None
        if (
            not isinstance(values, dict)
            or not set(values) <= {*STORE_FIELDS, *DRAFTING_FIELDS}
            or not all(isinstance(values.get(name, ""), str) for name in TEXT_FIELDS)
        ):
            raise OptionError(f"{SETTINGS_VARIABLE} is {text}: it must be a JSON object with any of {known}")
        drafting = {name: values[name] for name in DRAFTING_FIELDS if name in values}
        decoding = DecodeConfig(**{"sources": HOST_SOURCES, **drafting})
        return cls(decoding, StoresConfig(**{name: str(values[name]) for name in STORE_FIELDS if values.get(name)}))


PADDING_TOKEN = 0
"""Token of the nodes that pad a tree; SGLang verifies them as children of the root."""


class PayingNodes(Budget):
    """Budget that allows as many draft nodes as pay in a batch of requests on a CPU, up to a fixed number."""

    def __init__(self, max_nodes: int) -> None:
        self._max_nodes = max_nodes
        self.passes = MinProbability(on_cpu=True)
        self.requests = 1
        """Number of requests in the batch."""

    @property
    def max_nodes(self) -> int:
        return self._max_nodes

    def choose_size(self, probs: Probs) -> int:
        floor = self.passes.floor(self.requests)
        return min(self._max_nodes, int((probs >= floor).sum())) if floor < NO_DRAFT_ABOVE else 0


class HierarchyCorpus:
    """Replaces SGLang's n-gram corpus with one drafter per request; all drafters share the stores and the history."""

    def __init__(
        self,
        make: Callable[[], Drafter],
        nodes: int,
        vocabulary: int,
        set_nodes: Callable[[int], None] | None = None,
    ) -> None:
        """``make`` creates a drafter; trees have ``nodes`` nodes, root included; token ids are below ``vocabulary``.

        With ``set_nodes``, the trees of a batch have as many nodes as the largest one needs, and ``set_nodes`` is
        called with that number.
        """
        self._make, self._nodes, self._vocabulary, self._set_nodes = make, nodes, vocabulary, set_nodes
        self._requests: dict[str, _Request] = {}
        self._free = [make()]  # compiles the drafter now, so that no request waits for it

    def __contains__(self, request: str) -> bool:
        return request in self._requests

    def begin(self, request: str, context: Sequence[int]) -> None:
        """Start a request with its whole context; ``batch_get`` starts other requests with only their last tokens."""
        self._begin(request, context, len(context))

    def batch_get(
        self, req_ids: Sequence[str], batch_tokens: Sequence[Sequence[int]], total_lens: Sequence[int]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Draft a tree for each request; return ``(tokens, masks)``, flattened.

        Before flattening, tokens are ``[requests, nodes]`` and masks ``[requests, nodes, nodes]``, with 1 where the
        column is the row's node or its ancestor. ``batch_tokens`` holds the last tokens of each context, and
        ``total_lens`` the lengths of the contexts.
        """
        requests = []
        for name, tail, total in zip(req_ids, batch_tokens, total_lens, strict=True):
            request = self._requests.get(name)
            if request is None or not 0 <= total - request.total <= len(tail):
                request = self._begin(name, tail[:-1], total - 1)
            request.extend(tail[len(tail) - (total - request.total) :])
            requests.append(request)
        drafters, contexts = [running.drafter for running in requests], [running.context for running in requests]
        trees = [self._fitted(tree) for tree in draft_many(drafters, contexts)] if requests else []
        nodes = self._nodes
        if self._set_nodes:
            nodes = 1 + max(map(len, trees), default=0)
            self._set_nodes(nodes)
        tokens = np.full((len(trees), nodes), PADDING_TOKEN, np.int64)
        masks = np.zeros((len(trees), nodes, nodes), np.int64)
        masks[:, :, 0] = 1
        masks[:, np.arange(nodes), np.arange(nodes)] = 1
        for row, tree in enumerate(trees):
            rows = len(tree) + 1
            tokens[row, :rows] = tree.all_tokens
            masks[row, :rows, :rows] = tree.ancestor_mask
        return tokens.ravel(), masks.ravel()

    def batch_put(self, batch_tokens: Sequence[Sequence[int]]) -> None:
        """Do nothing: the next ``batch_get`` receives these tokens too."""

    def synchronize(self) -> None:
        """Do nothing: no work runs in the background."""

    def finish(self, request: str, context: Sequence[int]) -> None:
        """Append the new tokens at the end of ``context``, the request's whole context, and end its answer."""
        if running := self._requests.get(request):
            running.extend(context[running.total :])
            self.erase_match_state([request])

    def erase_match_state(self, req_ids: Iterable[str]) -> None:
        """End the answers of requests that have left the batch; a request that returns begins a new answer."""
        for name in req_ids:
            if request := self._requests.pop(name, None):
                request.drafter.end()
                self._free.append(request.drafter)

    def reset(self) -> None:
        """End all answers; stores and history are kept, because they stay valid when SGLang flushes its cache."""
        self.erase_match_state(list(self._requests))

    def _begin(self, name: str, context: Sequence[int], total: int) -> _Request:
        self.erase_match_state([name])
        request = _Request(self._free.pop() if self._free else self._make(), list(context), total)
        request.drafter.begin(request.context)
        self._requests[name] = request
        return request

    def _fitted(self, tree: DraftTree) -> DraftTree:
        return tree.first(self._nodes - 1).within(self._nodes - 1, self._vocabulary)


class _Request:
    """A request's drafter, its context (or only the known end of it), and the length of the whole context."""

    def __init__(self, drafter: Drafter, context: list[int], total: int) -> None:
        self.drafter, self.context, self.total = drafter, context, total

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens that the target has emitted, and let the drafter learn from them."""
        if tokens:
            self.context.extend(tokens)
            self.total += len(tokens)
            self.drafter.observe(Accepted([], list(tokens)), _NOT_ON_THE_HOST)


_NOT_ON_THE_HOST = Verified(torch.empty(0, 1))


def drafters_of(server_args: Any, budget: Budget) -> Callable[[], Drafter]:
    """Return a factory of drafters that use the model's stores and share a budget."""
    settings, model = SglangSettings.of(os.environ), server_args.model_path
    decoding = settings.decoding
    opener = opener_for_served(
        model,
        server_args.tokenizer_path,
        [server_args.served_model_name or model],
        settings.stores,
        settings.stores.namespace or None,
        revision=server_args.revision,
        trust_remote_code=server_args.trust_remote_code,
    )
    store_set = opener.open_for(decoding)
    LOGGER.info("hdtool drafts from %s", store_set)
    return lambda: drafter_with_budget(lambda: budget, decoding, store_set)
