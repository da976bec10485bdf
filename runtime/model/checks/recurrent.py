"""Checks that a model with recurrent layers computes draft trees as it decodes token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from transformers.cache_utils import DynamicCache

from hdtool.data.errors import HdtoolError, reason_of
from hdtool.runtime.model.cache.kv_cache import layer_shapes
from hdtool.runtime.model.cache.states import state_shapes
from hdtool.runtime.model.checks.small_tree import small_tree
from hdtool.runtime.model.families import decisive, distances, is_low_precision, refusal, tolerance_of
from hdtool.runtime.model.quantized_layers import quantized_layers, refuse_dependent_rows
from hdtool.runtime.model.recurrent.mixers import AttentionInMixerError, find_mixers
from hdtool.runtime.model.recurrent.passes import RecurrentLayers
from hdtool.runtime.tree import DraftTree

if TYPE_CHECKING:
    from hdtool.runtime.model.target import Target

CONTEXT, FIRST_PART = 13, 5
"""Tokens of the context of the check, and of its first part, which are more than a convolution reads."""
PATHS, DEPTH = 3, 2


@torch.inference_mode()
def prove_recurrent_trees(target: Target) -> None:
    """Check that a model with recurrent layers computes trees; raise FamilyError if it does not."""
    kind = target.model.config.model_type
    try:
        expected = _find_recurrences(target)
        distance = _distance(target, expected)
    except AttentionInMixerError as error:
        raise refusal(kind, f"has layers that cannot be computed over a tree: {error}") from error
    except (HdtoolError, torch.OutOfMemoryError, KeyboardInterrupt):
        raise
    except Exception as error:  # model code raises many kinds
        raise refusal(kind, f"fails on a small tree ({reason_of(error)})") from error
    if not distance <= _tolerance(target):
        raise refusal(kind, f"computes a tree wrongly after a recurrence (its logits are off by {distance:.2g} sigma)")
    target.continues = _continues(target, expected)


class Expected(NamedTuple):
    """Logits of decoding token by token, by the model's own code."""

    of_rows: list[torch.Tensor]
    """After the root of the small tree, and after each depth of its paths: ``[paths, vocabulary]``."""
    of_context: torch.Tensor
    """After the context, root included, if it is read in one pass."""


def _find_recurrences(target: Target) -> Expected:
    """Find what updates states, and the shapes of the cache; logits of decoding token by token."""
    context, _, paths = _small_tree(target)
    used = DynamicCache(config=target.config)
    target.rounding = None

    def run(cache: DynamicCache) -> None:
        nonlocal used
        used = cache
        _plain(target, [context[:-1]], cache)

    mixers = find_mixers(target.model, target.config, run)
    target.shapes, target.state_shapes = tuple(layer_shapes(used)), tuple(state_shapes(used))
    recurrent = target.stock.recurrent = RecurrentLayers(target.model, mixers, target.device)
    recurrent.use_closed_forms()
    each: Any = torch.zeros(PATHS, dtype=torch.int64, device=target.device)
    used.reorder_cache(each)
    steps = [[context[-1]] * PATHS, *zip(*paths, strict=True)]
    of_rows = [_plain(target, [[token] for token in step], used, CONTEXT - 1 + at) for at, step in enumerate(steps)]
    of_context = _plain(target, [context], DynamicCache(config=target.config))
    if quantized_layers(target.model):
        refuse_dependent_rows(target.model, target.device)
        target.rounding = float(distances(of_rows[0][:1], of_context).max())
    return Expected(of_rows, of_context)


def _distance(target: Target, expected: Expected) -> float:
    """The largest distance of logits of the small tree; computes in closed form if this is exact, else by levels."""
    recurrent = target.stock.recurrent
    assert recurrent
    if recurrent.has_closed_forms:
        try:
            distance = _distance_of_tree(target, expected)
            if distance <= _tolerance(target):
                return distance
        except (torch.OutOfMemoryError, KeyboardInterrupt):
            raise
        except Exception:  # code that calls what it mixes by in another way
            pass
        recurrent.use_levels()
    return _distance_of_tree(target, expected)


def _tolerance(target: Target) -> float:
    return max(tolerance_of(target.dtype, strict=True), 2 * (target.rounding or 0))


def _small_tree(target: Target) -> tuple[list[int], DraftTree, list[list[int]]]:
    return small_tree(target.config.vocab_size, PATHS, DEPTH, CONTEXT)


def _plain(target: Target, tokens: Sequence[Sequence[int]], cache: DynamicCache, start: int = 0) -> torch.Tensor:
    """Logits after the last token of each row, by the model's own code; ``start`` tokens were read before."""
    positions = [range(start, start + len(row)) for row in tokens]
    return target.stock.forward([list(row) for row in tokens], positions, None, cache)[:, -1]


def _distance_of_tree(target: Target, expected: Expected) -> float:
    """The largest distance of a row of the small tree, or of the next pass after a commit."""
    context, tree, paths = _small_tree(target)
    cache = target.allocate()
    target.prefill(cache, 0, context[:-1], room=2 * len(tree))
    of_tree = target.verify(cache, [tree])[0].logits.clone()
    of_paths = of_tree[1:].view(PATHS, DEPTH, -1)
    found = [of_tree[:1].expand(PATHS, -1), *of_paths.unbind(1)]
    target.commit(cache, 0, [DEPTH])  # the first node of the second path, so that positions and states move
    again = target.verify(cache, [DraftTree.bare(paths[1][1])])[0].logits
    distance = max(_between(target, *pair) for pair in zip(found, expected.of_rows, strict=True))
    return max(distance, _between(target, again[-1:], expected.of_rows[-1][1:2]))


def _between(target: Target, found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest distance; in low precision the median, since a row may go to other experts."""
    # Some models in low precision have logits in float32.
    is_rounded = target.rounding is not None or is_low_precision(target.dtype)
    return decisive(distances(found, expected), is_rounded=is_rounded)


def _continues(target: Target, expected: Expected) -> bool:
    """Whether the model's own pass over several tokens goes on from the states of the passes before.

    It is also compared with decoding: the layers of some models read several tokens in another way.
    """
    context, _, _ = _small_tree(target)
    cache = target.allocate()
    target.prefill(cache, 0, context[:FIRST_PART], room=len(context))
    try:
        in_parts = target.prefill(cache, 0, context[FIRST_PART:], FIRST_PART).logits
    except (torch.OutOfMemoryError, KeyboardInterrupt):
        raise
    except Exception:  # model code that starts at the first token only
        return False
    found = [_between(target, one, expected.of_context) for one in (in_parts, expected.of_rows[0][:1])]
    return all(distance <= _tolerance(target) for distance in found)
