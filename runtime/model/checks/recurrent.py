"""Checks that a model with recurrent layers computes draft trees as it decodes token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from transformers.cache_utils import DynamicCache

from hdtool.data.errors import HdtoolError, reason_of
from hdtool.runtime.model.cache.kv_cache import layer_shapes
from hdtool.runtime.model.cache.slots import Cache
from hdtool.runtime.model.cache.states import state_shapes
from hdtool.runtime.model.checks.small_tree import small_tree
from hdtool.runtime.model.families import LOW_PRECISION_TOLERANCE, distances, is_low_precision, refusal
from hdtool.runtime.model.recurrent.mixers import AttentionInMixerError, find_mixers
from hdtool.runtime.model.recurrent.passes import RecurrentLayers
from hdtool.runtime.tree import DraftTree

if TYPE_CHECKING:
    from hdtool.runtime.model.target import Target

CONTEXT, FIRST_PART = 13, 5
"""Tokens of the context of the check, and of its first part, which are more than a convolution reads."""
PATHS, DEPTH = 3, 2
STRICT_TOLERANCE = 1e-4
"""Allowed distance in standard deviations in float32, where the passes of an exact model differ by 1e-5 at most. Errors
of a recurrence are passed on from step to step, and some layers round them to other answers at 1e-3 already."""


@torch.inference_mode()
def prove_recurrent_trees(target: Target) -> None:
    """Check that a model with recurrent layers computes trees; raise FamilyError if it does not."""
    kind = target.model.config.model_type
    try:
        _find_recurrences(target)
        distance = _distance_of_tree(target)
    except AttentionInMixerError as error:
        raise refusal(kind, f"has layers that cannot be computed over a tree: {error}") from error
    except (HdtoolError, torch.OutOfMemoryError, KeyboardInterrupt):
        raise
    except Exception as error:  # model code raises many kinds
        raise refusal(kind, f"fails on a small tree ({reason_of(error)})") from error
    if not distance <= _tolerance(target):
        raise refusal(kind, f"computes a tree wrongly after a recurrence (its logits are off by {distance:.2g} sigma)")
    target.continues = _continues(target)
    _prefer_closed_forms(target)


def _prefer_closed_forms(target: Target) -> None:
    """Compute rows in closed form if that gives the same logits."""
    recurrent = target.stock.recurrent
    assert recurrent
    try:
        if recurrent.use_closed_forms() and _distance_of_tree(target) <= _tolerance(target):
            return
    except (torch.OutOfMemoryError, KeyboardInterrupt):
        raise
    except Exception:  # code that calls what it mixes by in another way
        pass
    recurrent.use_levels()


def _tolerance(target: Target) -> float:
    return LOW_PRECISION_TOLERANCE if is_low_precision(target.dtype) else STRICT_TOLERANCE


def _find_recurrences(target: Target) -> None:
    """Watch a pass over a few tokens: the modules that update states, and the shapes of the cache."""
    context, _, _ = _small_tree(target)

    def run(cache: DynamicCache) -> None:
        _plain(target, [context], cache)
        target.shapes, target.state_shapes = tuple(layer_shapes(cache)), tuple(state_shapes(cache))

    mixers = find_mixers(target.model, target.config, run)
    target.stock.recurrent = RecurrentLayers(target.model, mixers, target.device)


def _small_tree(target: Target) -> tuple[list[int], DraftTree, list[list[int]]]:
    return small_tree(target.config.vocab_size, PATHS, DEPTH, CONTEXT)


def _plain(target: Target, tokens: Sequence[Sequence[int]], cache: DynamicCache, start: int = 0) -> torch.Tensor:
    """Logits after the last token of each row, by the model's own code; ``start`` tokens were read before."""
    positions = [range(start, start + len(row)) for row in tokens]
    return target.stock.forward([list(row) for row in tokens], positions, None, cache)[:, -1]


def _distance_of_tree(target: Target) -> float:
    """The largest distance of a row of a tree, or of the next pass after a commit, from decoding token by token."""
    context, tree, paths = _small_tree(target)
    used = DynamicCache(config=target.config)
    steps = [[context[-1]] * PATHS, *zip(*paths, strict=True)]
    _plain(target, [context[:-1]] * PATHS, used)
    plain = [_plain(target, [[token] for token in step], used, CONTEXT - 1 + at) for at, step in enumerate(steps)]
    cache = target.allocate()
    target.prefill(cache, 0, context[:-1], room=2 * len(tree))
    of_tree = target.verify(cache, [tree])[0].logits
    of_paths = of_tree[1:].view(PATHS, DEPTH, -1)
    found = [of_tree[:1].expand(PATHS, -1), *of_paths.unbind(1)]
    target.commit(cache, 0, [DEPTH])  # the first node of the second path, so that positions and states move
    again = target.verify(cache, [DraftTree.bare(paths[1][1])])[0].logits
    distance = max(_distance(target, *pair) for pair in zip(found, plain, strict=True))
    return max(distance, _distance(target, again[-1:], plain[-1][1:2]))


def _distance(target: Target, found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest distance; in low precision the median, since a row may go to other experts."""
    each = distances(found, expected)
    # Some models in low precision have logits in float32.
    return float(each.median() if target.rounding is not None or is_low_precision(target.dtype) else each.max())


def _continues(target: Target) -> bool:
    """Whether the model's own pass over several tokens goes on from the states of the passes before."""
    context, _, _ = _small_tree(target)
    first, rest = context[:FIRST_PART], context[FIRST_PART:]
    whole = _plain(target, [context], DynamicCache(config=target.config))
    cache = target.allocate()
    target.prefill(cache, 0, first, room=len(context))
    try:
        in_parts = target.prefill(cache, 0, rest, len(first)).logits.clone()
    except (torch.OutOfMemoryError, KeyboardInterrupt):
        raise
    except Exception:  # model code that starts at the first token only
        return False
    row_by_row = _of_chain(target, cache, first, rest)
    pairs = (in_parts, whole), (in_parts, row_by_row)
    return all(_distance(target, *pair) <= _tolerance(target) for pair in pairs)


def _of_chain(target: Target, cache: Cache, first: Sequence[int], rest: Sequence[int]) -> torch.Tensor:
    """Logits after tokens that are verified as a chain after the first ones."""
    target.prefill(cache, 0, first, room=len(rest))
    chain = DraftTree.of(rest[0], list(rest[1:]), list(range(-1, len(rest) - 2)))
    return target.verify(cache, [chain])[0].logits[-1:]
