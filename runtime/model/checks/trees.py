"""Checks that a model computes draft trees: on a small tree, on a long context, and in captured steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from transformers.cache_utils import DynamicCache

from hdtool.data.errors import FamilyError, HdtoolError, reason_of
from hdtool.runtime.model.cache.kv_cache import layer_shapes
from hdtool.runtime.model.cache.slots import Cache
from hdtool.runtime.model.cache.states import has_states
from hdtool.runtime.model.checks.long_context import LARGEST_LENGTH, long_contexts
from hdtool.runtime.model.checks.recurrent import prove_recurrent_trees
from hdtool.runtime.model.checks.small_tree import small_tree
from hdtool.runtime.model.families import deviation, is_low_precision, refusal, refuse_by_logits
from hdtool.runtime.model.quantized_layers import measure_rounding, quantized_layers, refuse_dependent_rows

if TYPE_CHECKING:
    from hdtool.runtime.model.target import Target


@torch.inference_mode()
def prove_trees(target: Target) -> None:
    """Check that the model of a target follows masks and positions; raise FamilyError if it does not.

    The plain pass for comparison also gives the shapes of the KV cache and the rounding of the logits.
    """
    model, kind = target.model, target.model.config.model_type
    is_quantized = bool(quantized_layers(model))
    # The median of the paths decides. In low precision some may differ in experts; in float32 few are enough, and
    # a row of a large model takes up to 20 ms on a CPU.
    is_rounded = is_quantized or is_low_precision(target.dtype)
    context, tree, paths = small_tree(target.config.vocab_size, *((5, 3) if is_rounded else (3, 2)))
    try:
        used = DynamicCache(config=target.config)
    except Exception as error:  # a configuration of parts, none of which decodes
        raise refusal(kind, f"has a configuration of which the library makes no cache ({reason_of(error)})") from error
    if has_states(used):
        return prove_recurrent_trees(target)
    whole = torch.tensor([[*context, *path] for path in paths], device=target.device)
    target.rounding = None
    try:
        options = {} if is_quantized else target.stock.last_only
        plain = model(input_ids=whole, use_cache=True, **{target.stock.cache_name: used}, **options).logits
        target.shapes = tuple(layer_shapes(used))
        if is_quantized:
            with target.stock.row_by_row.on():
                refuse_dependent_rows(model, target.device)
                target.rounding = measure_rounding(model, whole, plain)
        cache = target.allocate()
        target.prefill(cache, 0, context[:-1], room=len(tree))
        of_tree = target.verify(cache, [tree])[0].logits
    except (HdtoolError, torch.OutOfMemoryError, KeyboardInterrupt):
        raise
    except Exception as error:  # model code raises many kinds
        reason = reason_of(error)
        raise FamilyError(f"models of type {kind!r} cannot be used: checking a small tree failed ({reason})") from error
    depth = len(paths[0])
    last_of_path = of_tree.view(-1, of_tree.shape[-1])[depth::depth]
    if target.rounding is None and is_low_precision(plain.dtype) and deviation(last_of_path, plain[:, -1]):
        # Some models round more than their dtype suggests, even without quantized layers.
        target.rounding = measure_rounding(model, whole, model(input_ids=whole).logits)
    refuse_by_logits(kind, last_of_path, plain[:, -1], target.rounding)
    _check_long_contexts(target, [context[-1], *tree.tokens], used)


def _check_long_contexts(target: Target, tokens: Sequence[int], used: DynamicCache) -> None:
    """Check a tree after more tokens than a window has, if the model may have one beside those of the masks."""
    kind, limit = target.model.config.model_type, target.context_limit(LARGEST_LENGTH)
    for context in long_contexts(target.model, target.stock.windows, limit):
        try:
            of_tree, plain = context.logits(target.stock.forward, target.stock.masks, tokens, target.shapes, used)
        except (HdtoolError, torch.OutOfMemoryError, KeyboardInterrupt):
            raise
        except Exception as error:  # model code raises many kinds
            reason = f"fails on a tree {context.found_in} ({reason_of(error)}): {context.cause}"
            raise refusal(kind, reason) from error
        if distance := deviation(of_tree, plain, target.rounding):
            reason = f"computes a tree wrongly {context.found_in} (its logits are off by {distance}): "
            raise refusal(kind, reason + context.cause)


def two_steps(target: Target, cache: Cache) -> list[torch.Tensor]:
    """Logits of a tree, and of the same tree after an accepted path that must be moved."""
    context, tree, _ = small_tree(target.config.vocab_size)
    target.prefill(cache, 0, context[:-1], room=2 * len(tree))
    first = target.verify(cache, [tree])[0]
    target.wait()
    found = [first.logits.clone()]
    target.commit(cache, 0, [3, 4, 5])
    second = target.verify(cache, [tree])[0]
    target.wait()
    return [*found, second.logits.clone()]
