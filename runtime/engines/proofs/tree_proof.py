"""Checks that a model gives the same logits for draft trees as when it decodes token by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from transformers.cache_utils import DynamicCache

from hdtool.data.errors import FamilyError, HdtoolError, error_reason
from hdtool.runtime.caches.kv_cache import layer_shapes
from hdtool.runtime.caches.recurrent_states import has_states
from hdtool.runtime.core.tolerances import is_low_precision
from hdtool.runtime.engines.backend import BackendEngine
from hdtool.runtime.engines.proofs.chain_proof import prove_chains
from hdtool.runtime.engines.proofs.long_contexts import LARGEST_LENGTH, long_contexts
from hdtool.runtime.engines.proofs.probes import logits_of, small_tree
from hdtool.runtime.engines.proofs.recurrent_tree_proof import prove_recurrent_trees
from hdtool.runtime.engines.stock.model_facts import ModelFacts
from hdtool.runtime.engines.stock.stock_model import StockModel
from hdtool.runtime.engines.stock.tree_passes import TreePasses
from hdtool.runtime.model.quantization import measure_rounding, quantized_layers, refuse_dependent_rows
from hdtool.runtime.model.refusals import (
    context_limit,
    deviation,
    refusal,
    refuse_by_logits,
    refuse_trees,
    tells_prompts_from_answers,
)
from hdtool.runtime.model.transformers_internals import windows_only_the_cache


def prove(stock: StockModel, known: ModelFacts | None = None) -> ModelFacts:
    """Find out whether a model verifies trees, or else chains; raise a ``FamilyError`` if it can do neither.

    ``known`` are the facts from before the model changed. A model that verified trees must still do so, and one that
    verified chains is checked for chains alone.
    """
    continues = not windows_only_the_cache(stock.model, stock.config) and not tells_prompts_from_answers(stock.config)
    facts = ModelFacts(continues=continues)
    if known and known.no_trees:
        return prove_chains(stock, facts, known.no_trees)
    try:
        refuse_trees(stock.model, positions=stock.takes_positions, mask=stock.takes_mask)
        return prove_trees(stock, facts)
    except FamilyError as no_trees:
        if known:
            raise
        return prove_chains(stock, facts, no_trees)


@torch.inference_mode()
def prove_trees(stock: StockModel, facts: ModelFacts) -> ModelFacts:
    """Check that a model respects masks and positions; raise a ``FamilyError`` if not.

    Return the facts with the shapes of the model's KV cache and, if measured, the rounding error of its logits. Models
    with recurrent layers are checked by ``prove_recurrent_trees``.
    """
    model, kind = stock.model, stock.model.config.model_type
    is_quantized = bool(quantized_layers(model))
    # The median over paths decides. In low precision, some paths may be routed to other experts. In float32 few paths
    # are enough, which saves time: a row of a large model takes up to 20 ms on a CPU.
    is_rounded = is_quantized or is_low_precision(stock.dtype)
    context, tree, paths = small_tree(stock.config.vocab_size, *((5, 3) if is_rounded else (3, 2)))
    try:
        used = DynamicCache(config=stock.config)
    except Exception as error:  # a configuration with parts, none of which is a decoder
        raise refusal(
            kind, f"has a configuration of which the library makes no cache ({error_reason(error)})"
        ) from error
    if has_states(used):
        return prove_recurrent_trees(stock, facts)
    whole = torch.tensor([[*context, *path] for path in paths], device=stock.device)
    try:
        options = {} if is_quantized else stock.last_only
        plain = model(input_ids=whole, use_cache=True, **{stock.cache_name: used}, **options).logits
        facts = replace(facts, shapes=tuple(layer_shapes(used)))
        if is_quantized:
            with stock.row_by_row.on():
                refuse_dependent_rows(model, stock.device)
                facts = replace(facts, rounding=measure_rounding(model, whole, plain))
        engine = BackendEngine([], TreePasses(stock, facts), stock.log)
        (of_tree,) = logits_of(engine, context[:-1], [(tree, [])])
    except (HdtoolError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # model code may raise any error
        reason = error_reason(error)
        raise FamilyError(f"models of type {kind!r} cannot be used: checking a small tree failed ({reason})") from error
    depth = len(paths[0])
    last_of_path = of_tree.view(-1, of_tree.shape[-1])[depth::depth]
    if facts.rounding is None and is_low_precision(plain.dtype) and deviation(last_of_path, plain[:, -1]):
        # Some models round more than their dtype suggests, even without quantized layers.
        facts = replace(facts, rounding=measure_rounding(model, whole, model(input_ids=whole).logits))
    refuse_by_logits(kind, last_of_path, plain[:, -1], facts.rounding)
    _check_long_contexts(stock, facts, [context[-1], *tree.tokens], used)
    return facts


def _check_long_contexts(stock: StockModel, facts: ModelFacts, tokens: Sequence[int], used: DynamicCache) -> None:
    """Raise a ``FamilyError`` if a tree is wrong after contexts longer than windows that hdtool's masks may lack."""
    kind, limit = stock.model.config.model_type, context_limit(stock.config, LARGEST_LENGTH)
    for context in long_contexts(stock.model, stock.windows, limit):
        try:
            of_tree, plain = context.logits(stock.forward, stock.masks, tokens, facts.shapes, used)
        except (HdtoolError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # model code may raise any error
            reason = f"fails on a tree {context.found_in} ({error_reason(error)}): {context.cause}"
            raise refusal(kind, reason) from error
        if distance := deviation(of_tree, plain, facts.rounding):
            reason = f"computes a tree wrongly {context.found_in} (its logits are off by {distance}): "
            raise refusal(kind, reason + context.cause)
