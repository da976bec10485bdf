"""Proposals of trained drafters, their calibration, and checkpoints of published drafters.

A proposal ranks the next tokens after the root and after draft paths below it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import Module

from hdtool.data.errors import HeadsError, error_reason
from hdtool.runtime.config.model import ModelConfig
from hdtool.runtime.core.acceptance_rates import AcceptanceRates
from hdtool.runtime.kernels.compiled import Array, compiled
from hdtool.runtime.weights.checkpoint_identity import place_of

if TYPE_CHECKING:
    from hdtool.runtime.target.target import Target

Loaded = TypeVar("Loaded")
LOADED_BY_TARGET: WeakKeyDictionary[Target, dict[str, Any]] = WeakKeyDictionary()
"""Results of ``loaded_once`` by target and name."""


def loaded_once(target: Target, name: str, load: Callable[[], Loaded]) -> Loaded:
    """Return the result of ``load``, which is called only once for each target and name."""
    loaded = LOADED_BY_TARGET.setdefault(target, {})
    if name not in loaded:
        loaded[name] = load()
    return cast(Loaded, loaded[name])


EAGLE3, DFLASH, GEMMA_ASSISTANT, SMALL_MODEL = "EAGLE-3", "DFlash", "assistant", "model"
"""Kinds of published drafters; ``SMALL_MODEL`` is any small language model."""
UNSUPPORTED_KINDS = {
    "eagle": "an EAGLE drafter of an earlier kind",
    "medusa": "a set of Medusa heads",
    "peagle": "a P-EAGLE drafter",
}
"""Descriptions of unsupported drafters, by a word in the name of their class."""
CONFIG_FILE = "config.json"


@dataclass(frozen=True)
class PublishedDrafter:
    """The checkpoint of a drafter, given by its folder or its name on the Hugging Face Hub."""

    name: str
    folder: Path
    settings: dict[str, Any]

    @classmethod
    def named(cls, name: str) -> PublishedDrafter:
        folder = place_of(ModelConfig(name), (CONFIG_FILE,), weights=True)
        try:
            settings = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
            return cls(name, folder, dict(settings))
        except (OSError, ValueError) as error:
            raise HeadsError(
                f"drafter {name} cannot be read ({CONFIG_FILE}: {error_reason(error)}): download it again"
            ) from error

    @property
    def kind(self) -> str:
        """The kind of drafter; raises HeadsError if it is not supported."""
        classes = " ".join(map(str, self.settings.get("architectures") or ())).lower()
        speculator = str(self.settings.get("speculators_model_type", "")).lower()
        if "eagle3" in classes or speculator == "eagle3":
            return EAGLE3
        if "dflash" in classes + speculator or {"target_layer_ids", "block_size"} <= self.settings.keys():
            return DFLASH
        if "assistantforcausallm" in classes:
            return GEMMA_ASSISTANT
        for word, kind in UNSUPPORTED_KINDS.items():
            if word in classes + speculator:
                raise HeadsError(f"drafter {self.name} is {kind}, which is not supported: name another one")
        return SMALL_MODEL

    def tensors(self) -> dict[str, torch.Tensor]:
        """Load all tensors of the checkpoint into host memory."""
        from safetensors.torch import load_file

        by_name: dict[str, torch.Tensor] = {}
        files = sorted([*self.folder.glob("*.safetensors"), *self.folder.glob("pytorch_model*.bin")])
        if any(file.suffix == ".safetensors" for file in files):
            files = [file for file in files if file.suffix == ".safetensors"]
        try:
            for file in files:
                by_name |= load_file(file) if file.suffix == ".safetensors" else torch.load(file, weights_only=True)
        except Exception as error:  # damaged files raise many kinds
            reason = error_reason(error).split(". ")[0]
            raise HeadsError(
                f"drafter {self.name} cannot be read ({file.name}: {reason}): download it again"
            ) from error
        if not by_name:
            raise HeadsError(f"drafter {self.name} has no weights in {self.folder}: download it again")
        return by_name

    def pretrained(self, auto: Any) -> Any:
        """Load the checkpoint by one of transformers' ``Auto`` classes."""
        try:
            return auto.from_pretrained(self.folder, trust_remote_code=False)
        except Exception as error:  # the library raises many kinds
            raise HeadsError(
                f"drafter {self.name} cannot be loaded ({error_reason(error)}): name another one"
            ) from error

    def require_width(self, width: int | None, target: Target) -> None:
        """Raise HeadsError unless ``width`` is that of the target's hidden states."""
        if width != (required := int(target.config.hidden_size)):
            raise HeadsError(
                f"drafter {self.name} is for a model of width {width}, and this one has {required}: name a drafter of "
                "this model"
            )

    def fill(self, module: Module, tensors: dict[str, torch.Tensor]) -> None:
        """Load a module's parameters from ``tensors``; raise HeadsError if one is missing or has a different shape."""
        parameters = {name: tensor for name, tensor in module.state_dict().items() if tensor is not None}
        missing = sorted(parameters.keys() - tensors.keys())
        mismatched = sorted(
            name for name in parameters.keys() & tensors.keys() if parameters[name].shape != tensors[name].shape
        )
        if missing or mismatched:
            what = f"lacks {missing[0]}" if missing else f"has another shape of {mismatched[0]}"
            raise HeadsError(f"drafter {self.name} {what}, so it is of a kind that is not supported: name another one")
        module.load_state_dict({name: tensors[name] for name in parameters})


TOKENS_PER_RANKING = 10
"""Number of tokens in a ranking."""
MAX_RANKINGS = 64
NO_RANKING_AFTER = -1
"""Index of a ranking that does not exist: the tokens that may follow are unknown."""


class Proposal(NamedTuple):
    """Rankings of the next token after several paths; the first ranking follows the root."""

    tokens: Array
    """Tokens ``[rankings, best]``, most probable first."""
    probs: Array
    """Probability of each token, given that the path before it is accepted."""
    after: Array
    """Index of the ranking that follows each token, or ``NO_RANKING_AFTER``."""
    after_others: Array
    """For each ranking, the index of the ranking after a token that it does not contain, or ``NO_RANKING_AFTER``."""
    depths: Array
    """Number of tokens between the root and the token that each ranking predicts."""

    @classmethod
    def in_parallel(cls, tokens: Array, probs: Array) -> Proposal:
        """Return a proposal of rankings ``[positions, best]`` that do not depend on the tokens at earlier positions."""
        positions = np.arange(len(tokens))
        follows = np.where(positions + 1 < len(tokens), positions + 1, NO_RANKING_AFTER)
        return cls(tokens, probs, np.broadcast_to(follows[:, None], tokens.shape), follows, positions)

    @classmethod
    def in_turn(cls, tokens: Array, probs: Array) -> Proposal:
        """Return a proposal of rankings ``[positions, best]``, each after the best token at the position before."""
        number = len(tokens)
        after = np.full(tokens.shape, NO_RANKING_AFTER)
        after[:-1, 0] = np.arange(1, number)
        return cls(tokens, probs, after, np.full(number, NO_RANKING_AFTER), np.arange(number))

    def along(self, tokens: list[int]) -> list[int]:
        """Return the index of the ranking for each emitted token, up to the first token that has none."""
        rankings, at = list[int](), 0
        for token in tokens:
            if at == NO_RANKING_AFTER or at >= len(self.tokens):
                break
            rankings.append(at)
            named = np.flatnonzero(self.tokens[at] == token)
            at = int(self.after[at, named[0]] if len(named) else self.after_others[at])
        return rankings


@compiled
def best_paths(
    probs: Array, after: Array, max_nodes: int, parents: Array, ranks: Array, rankings: Array, path_probs: Array
) -> int:
    """Write the most probable nodes of a proposal to the last four arguments, best first; return the number of nodes.

    Each node is a token of the ranking that follows its parent: ``rankings`` gets the index of this ranking, ``ranks``
    the token's rank in it.
    """
    best = probs.shape[1]
    below = np.zeros(max_nodes + 1, np.int64)  # number of children of the root and each node
    size = 0
    while size < max_nodes:
        highest, chosen, of_chosen = 0.0, -1, -1
        for node in range(size + 1):
            ranking = after[rankings[node - 1], ranks[node - 1]] if node > 0 else min(0, len(probs) - 1)
            if ranking >= 0 and below[node] < best:
                path_prob = probs[ranking, below[node]] * (path_probs[node - 1] if node > 0 else 1.0)
                if path_prob > highest:
                    highest, chosen, of_chosen = path_prob, node, ranking
        if chosen < 0:
            break
        parents[size], ranks[size], rankings[size] = chosen - 1, below[chosen], of_chosen
        path_probs[size] = highest
        below[chosen] += 1
        size += 1
    return size


PROB_BUCKETS = 28
BUCKETS_PER_HALVING = 2.0
"""Number of buckets per halving of the probability."""
BUCKET_PRIOR_WEIGHT = 30.0
"""Weight of the initial acceptance rates, in observations."""
MIN_BUCKET_PROB = 1e-4


class Calibration:
    """Learns how often a head's tokens are accepted after an accepted path, by bucket of the predicted probability."""

    def __init__(self, probs: list[list[float]] | None, heads: int) -> None:
        """``probs`` are initial acceptance rates by head and bucket; by default, the heads' own probabilities."""
        first = np.array(probs) if probs else np.tile(bucket_center(np.arange(PROB_BUCKETS)), (heads, 1))
        self._last_head = len(first) - 1
        self._rates = AcceptanceRates(np.clip(first, MIN_BUCKET_PROB, 1.0).ravel(), BUCKET_PRIOR_WEIGHT)

    def __call__(self, heads: int | npt.NDArray[np.int64], buckets: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Return calibrated probabilities ``[rankings, best]`` of the best tokens, given their heads and buckets."""
        probs = self._rates[self._classes(heads, buckets)]
        # The probabilities of a ranking must not increase with the rank, and their sum must not exceed 1.
        probs = np.minimum.accumulate(probs, axis=1)
        return np.asarray(probs / np.maximum(1.0, probs.sum(axis=1, keepdims=True)))

    def _classes(self, heads: int | npt.NDArray[np.int64], buckets: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the class of each token; heads beyond the last one share its calibration."""
        return np.minimum(heads, self._last_head) * PROB_BUCKETS + buckets

    def learn(self, proposal: Proposal, buckets: npt.NDArray[np.int64], tokens: list[int]) -> None:
        """Update the rates from the rankings along the emitted tokens; verification did not test the others."""
        for token, ranking in zip(tokens, proposal.along(tokens), strict=False):
            classes = self._classes(int(proposal.depths[ranking]), buckets[ranking])
            self._rates.learn(classes, proposal.tokens[ranking] == token)


def prob_bucket(probs: Array) -> npt.NDArray[np.int64]:
    """Return the bucket of each probability p, on a log scale of p up to 0.5 and of 1 - p above. NaN counts as 0."""
    probs = np.nan_to_num(probs)
    complement = np.clip(1.0 - probs, 2.0**-6, 1.0)
    high = np.floor(-BUCKETS_PER_HALVING * np.log2(complement))
    low = np.floor(-BUCKETS_PER_HALVING * np.log2(np.clip(probs, 2.0**-8, 1.0)))
    return np.where(probs > 0.5, 12 - np.clip(high, 2, 12), np.clip(low + 9, 11, PROB_BUCKETS - 1)).astype(np.int64)


def bucket_center(bucket: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Return the probability at the center of each bucket."""
    high = 1 - 2.0 ** (-(12 - bucket + 0.5) / BUCKETS_PER_HALVING)
    low = 2.0 ** (-(bucket - 9 + 0.5) / BUCKETS_PER_HALVING)
    return np.where(bucket <= 10, high, low)
