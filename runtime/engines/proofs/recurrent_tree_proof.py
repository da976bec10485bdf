"""Checks that a model with recurrent layers gives the same logits for draft trees as token by token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.nn import Module
from transformers.cache_utils import DynamicCache

from hdtool.data.errors import HdtoolError, error_reason
from hdtool.runtime.caches.kv_cache import layer_shapes
from hdtool.runtime.caches.recurrent_states import state_shapes
from hdtool.runtime.core.tolerances import aggregate_distance, distances, is_low_precision, tolerance_of
from hdtool.runtime.core.tree import DraftTree
from hdtool.runtime.engines.backend import BackendEngine
from hdtool.runtime.engines.proofs.probes import logits_of, small_tree
from hdtool.runtime.engines.stock.model_facts import ModelFacts
from hdtool.runtime.engines.stock.recurrent_layers import RecurrentLayers, described_mixers
from hdtool.runtime.engines.stock.stock_model import StockModel
from hdtool.runtime.engines.stock.tree_passes import TreePasses
from hdtool.runtime.engines.stock.undescribed_mixers import AttentionInMixerError, Mixer, find_mixers
from hdtool.runtime.model.quantization import quantized_layers, refuse_dependent_rows
from hdtool.runtime.model.refusals import refusal
from hdtool.runtime.program.mixer_parts import MixerParts

CONTEXT, FIRST_PART = 13, 5
"""Context length of the check, and length of the context's first part; both lengths exceed the size of convolutions."""
PATHS, DEPTH = 3, 2


@torch.inference_mode()
def prove_recurrent_trees(stock: StockModel, facts: ModelFacts) -> ModelFacts:
    """Check that a model with recurrent layers verifies trees correctly; raise a ``FamilyError`` if not.

    Return the completed facts, by which described mixers compute in closed form if that gives right results, and level
    by level otherwise.
    """
    kind = stock.model.config.model_type
    try:
        facts, expected = _expected_logits(stock, facts)
        if described := described_mixers(stock.model, facts.state_shapes):
            check = _RecurrenceCheck(stock, _with_mixers(stock, facts, described), expected)
            if check.passes():
                return check.complete_facts()
        check = _RecurrenceCheck(stock, _with_mixers(stock, facts, {}), expected)
        distance = check.distance()
    except AttentionInMixerError as error:
        raise refusal(kind, f"has layers that cannot be computed over a tree: {error}") from error
    except (HdtoolError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # model code may raise any error
        raise refusal(kind, f"fails on a small tree ({error_reason(error)})") from error
    if not distance <= check.tolerance:
        raise refusal(kind, f"computes a tree wrongly after a recurrence (its logits are off by {distance:.2g} sigma)")
    return check.complete_facts()


class Expected(NamedTuple):
    """Reference logits, computed by the model's own code."""

    of_rows: list[torch.Tensor]
    """Logits after the root of the small tree and after each depth of its paths, shape ``[paths, vocabulary]``."""
    of_context: torch.Tensor
    """Logits after the context and the root, read in one pass."""


def _with_mixers(stock: StockModel, facts: ModelFacts, described: Mapping[int, MixerParts[Module]]) -> ModelFacts:
    """Return the facts with recurrent layers: the described ones, and those found by observing a pass."""
    layers, others = {shape.name.layer for shape in facts.state_shapes}, list[Mixer]()
    if layers - described.keys():
        context, _, _ = _small_tree(stock)
        mixers = find_mixers(stock.model, stock.config, lambda cache: _plain(stock, [context[:-1]], cache))
        others = [mixer for mixer in mixers if mixer.layer not in described]
    return replace(facts, recurrent=RecurrentLayers(stock.model, stock.device, described, others))


def _expected_logits(stock: StockModel, facts: ModelFacts) -> tuple[ModelFacts, Expected]:
    """Return the facts with the shapes of the cache and the rounding of quantized layers, and the expected logits."""
    context, _, paths = _small_tree(stock)
    used = DynamicCache(config=stock.config)
    _plain(stock, [context[:-1]], used)
    facts = replace(facts, shapes=tuple(layer_shapes(used)), state_shapes=tuple(state_shapes(used)))
    each: Any = torch.zeros(PATHS, dtype=torch.int64, device=stock.device)
    used.reorder_cache(each)
    steps = [[context[-1]] * PATHS, *zip(*paths, strict=True)]
    of_rows = [_plain(stock, [[token] for token in step], used, CONTEXT - 1 + at) for at, step in enumerate(steps)]
    of_context = _plain(stock, [context], DynamicCache(config=stock.config))
    if quantized_layers(stock.model):
        refuse_dependent_rows(stock.model, stock.device)
        facts = replace(facts, rounding=float(distances(of_rows[0][:1], of_context).max()))
    return facts, Expected(of_rows, of_context)


def _small_tree(stock: StockModel) -> tuple[list[int], DraftTree, list[list[int]]]:
    return small_tree(stock.config.vocab_size, PATHS, DEPTH, CONTEXT)


def _plain(stock: StockModel, tokens: Sequence[Sequence[int]], cache: DynamicCache, start: int = 0) -> torch.Tensor:
    """Return the logits that the model's own code gives after each row; ``cache`` already has ``start`` tokens."""
    positions = [range(start, start + len(row)) for row in tokens]
    return stock.forward([list(row) for row in tokens], positions, None, cache)[:, -1]


def between(stock: StockModel, facts: ModelFacts, actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest of the rows' distances from the expected logits.

    In low precision and with quantized layers, return the median, because a row may be routed to other experts.
    """
    # Some models in low precision return logits in float32.
    is_rounded = facts.rounding is not None or is_low_precision(stock.dtype)
    return aggregate_distance(distances(actual, expected), is_rounded=is_rounded)


class _RecurrenceCheck:
    """Compares the logits of a recurrent model's passes over trees with the expected ones."""

    def __init__(self, stock: StockModel, facts: ModelFacts, expected: Expected) -> None:
        self._stock, self._facts, self._expected = stock, facts, expected
        self._engine = BackendEngine([], TreePasses(stock, facts), stock.log)
        self.tolerance = max(tolerance_of(stock.dtype, strict=True), 2 * (facts.rounding or 0))

    def complete_facts(self) -> ModelFacts:
        """Return the facts, with ``continues`` set by checking passes that continue from earlier states."""
        return replace(self._facts, continues=self._continues())

    def passes(self) -> bool:
        """Return True if passes over trees run without errors and their logits are within the tolerance."""
        try:
            return self.distance() <= self.tolerance
        except torch.OutOfMemoryError:
            raise
        except Exception:  # modules that are called in another way
            return False

    def distance(self) -> float:
        """Return the largest distance from the expected logits, over the small tree and a pass after a commit."""
        (context, tree, paths), expected = _small_tree(self._stock), self._expected.of_rows
        # The first node of the second path is accepted, so that positions move and states advance.
        steps = [(tree, [DEPTH]), (DraftTree.bare(paths[1][1]), [])]
        of_tree, again = logits_of(self._engine, context[:-1], steps)
        of_paths = of_tree[1:].view(PATHS, DEPTH, -1)
        actual = [of_tree[:1].expand(PATHS, -1), *of_paths.unbind(1)]
        distance = max(map(self._between, actual, expected))
        return max(distance, self._between(again[-1:], expected[-1][1:2]))

    def _between(self, actual: torch.Tensor, expected: torch.Tensor) -> float:
        return between(self._stock, self._facts, actual, expected)

    def _continues(self) -> bool:
        """Return True if a pass over several tokens continues correctly from the states of earlier passes.

        Reading the last token separately must also give the logits of a single pass over the context, since the layers
        of some models compute several tokens differently from a single one. Models that bound their time steps are
        rejected without a pass: they only differ for rare tokens, which the context may lack.
        """
        if self._facts.recurrent and self._facts.recurrent.bounds_prompts:
            return False
        engine, (context, _, _) = self._engine, _small_tree(self._stock)
        cache = engine.allocate()
        engine.prefill(cache, 0, context[:FIRST_PART], room=len(context))
        try:
            in_parts = engine.prefill(cache, 0, context[FIRST_PART:], FIRST_PART).logits
        except torch.OutOfMemoryError:
            raise
        except Exception:  # model code that can only start at the first token
            return False
        of_context = self._expected.of_context
        gaps = [self._between(logits, of_context) for logits in (in_parts, self._expected.of_rows[0][:1])]
        return all(distance <= self.tolerance for distance in gaps)
