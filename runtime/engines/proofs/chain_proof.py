"""Checks that a model that cannot verify trees gives the same logits for chains of drafts as token by token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from hdtool.data.errors import FamilyError, HdtoolError, error_reason
from hdtool.runtime.caches.replay_slots import Replaced, TensorPath
from hdtool.runtime.core.tolerances import aggregate_distance, distances, is_low_precision, tolerance_of
from hdtool.runtime.core.tree import DraftTree
from hdtool.runtime.engines.backend import BackendEngine
from hdtool.runtime.engines.proofs.long_contexts import sizes_of
from hdtool.runtime.engines.proofs.probes import some_context
from hdtool.runtime.engines.stock.chain_passes import ChainPasses
from hdtool.runtime.engines.stock.model_facts import ModelFacts
from hdtool.runtime.engines.stock.stock_model import StockModel
from hdtool.runtime.model.quantization import quantized_layers, refuse_dependent_rows
from hdtool.runtime.model.refusals import USE_GENERATE, context_limit
from hdtool.runtime.model.transformers_internals import cache_in, first_logits

MIN_CONTEXT, MAX_CONTEXT = 24, 288
"""Number of tokens by which the context exceeds the largest window or state size, and the context's maximum length."""
CHAINS = ((4, 2), (3, 3), (5, 0), (2, 1), (0, 0), (4, 4), (6, 1))
"""Pairs ``(drafted, accepted)``: the number of drafted and of accepted tokens in each pass of the check."""
DECODED_TOKENS = sum(1 + accepted for _, accepted in CHAINS)
REREAD_TOKENS = 3
"""Number of tokens read again after all chains, continuing the cache that was kept after the context."""


def prove_chains(stock: StockModel, facts: ModelFacts, no_trees: FamilyError) -> ModelFacts:
    """Check that verifying chains gives the logits of token-by-token decoding; return the facts for ``ChainPasses``.

    Raise a ``FamilyError`` if it doesn't. ``no_trees`` says why trees fail.
    """
    model = stock.model
    if stock.row_by_row.layers:
        raise no_trees
    if quantized_layers(model):
        refuse_dependent_rows(model, stock.device)
    context, tokens = _context(stock), some_context(DECODED_TOKENS, stock.config.vocab_size)
    before = dict(_tensors_in_modules(model))
    try:
        # Tensor versions show what a pass changes in place; inference mode doesn't track them.
        with torch.inference_mode(False), torch.no_grad():
            plain, paths = _token_by_token(stock, context, tokens)
        facts = replace(facts, no_trees=no_trees, replaced=paths)
        actual = _by_chains(BackendEngine([], ChainPasses(stock, facts), stock.log), context, tokens)
        numbered, in_parts = _distances_of_prompt(stock, context)
    except (HdtoolError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # model code may raise any error
        raise _refused(no_trees, f"it fails on a chain of drafts ({error_reason(error)})") from error
    gaps = distances(actual, torch.cat([plain, plain[REREAD_TOKENS - 1 : REREAD_TOKENS]]))
    distance = aggregate_distance(gaps, is_rounded=is_low_precision(stock.dtype))
    tolerance = tolerance_of(stock.dtype, strict=True)
    if not distance <= tolerance:
        changed = next((name for name, tensor in _tensors_in_modules(model) if before.get(name) is not tensor), None)
        place = f"{changed} is a state outside of the cache" if changed else "its passes over several tokens are wrong"
        raise _refused(no_trees, f"a chain of drafts is off by {distance:.2g} sigma: {place}")
    if not numbered <= tolerance:
        raise _refused(no_trees, "it numbers positions in another way than 0, 1, 2, …")
    return replace(facts, continues=facts.continues and in_parts <= tolerance)


@torch.inference_mode()
def _distances_of_prompt(stock: StockModel, context: Sequence[int]) -> tuple[float, float]:
    """Return how far the logits of one pass over a prompt are from those of ``generate`` and from those of two passes.

    ``generate`` may number positions differently. Two passes, each over a part of the prompt, differ from one pass if
    attention within the prompt is bidirectional.
    """
    ids = torch.tensor([list(context)], device=stock.device)
    positions, middle = torch.arange(len(context), device=stock.device)[None], len(context) // 2
    whole = stock.call(ids, positions, None, None).logits[:, -1]
    try:
        by_library = first_logits(stock.model, ids)
    except Exception:  # generate cannot call this model's forward
        by_library = whole
    first = cache_in(stock.call(ids[:, :middle], positions[:, :middle], None, None))
    in_parts = stock.call(ids[:, middle:], positions[:, middle:], None, first).logits[:, -1]
    return float(distances(whole, by_library)), float(distances(in_parts, whole))


def _refused(no_trees: FamilyError, reason: str) -> FamilyError:
    return FamilyError(f"{no_trees}; {reason}. {USE_GENERATE}")


def _context(stock: StockModel) -> list[int]:
    """Return a context longer than all configured windows and state sizes that the model and ``MAX_CONTEXT`` allow."""
    sizes = [size for _, size in sizes_of(vars(stock.config)) if size + MIN_CONTEXT <= MAX_CONTEXT]
    length, limit = max(sizes, default=0) + MIN_CONTEXT, context_limit(stock.config, 1)
    if limit is not None:
        length = max(1, min(length, limit - DECODED_TOKENS - max(drafted for drafted, _ in CHAINS)))
    return some_context(length + 1, stock.config.vocab_size)[1:]


def _token_by_token(
    stock: StockModel, context: Sequence[int], tokens: Sequence[int]
) -> tuple[torch.Tensor, frozenset[TensorPath]]:
    """Return the logits after each token, and the ``TensorPath`` of each cache tensor that every pass replaces."""
    logits: list[torch.Tensor] = []
    cache: Any = None

    def read(new: Sequence[int], start: int) -> None:
        nonlocal cache
        ids = torch.tensor([list(new)], device=stock.device)
        output = stock.call(ids, torch.arange(start, start + len(new), device=stock.device)[None], None, cache)
        cache = cache_in(output)
        logits.append(output.logits[0, -1].clone())

    read(context, 0)
    replaced, length = Replaced(), len(context)
    for token in tokens:
        replaced.watch(lambda: cache, partial(read, [token], length))
        length += 1
    plain = torch.stack(logits[1:])
    replaced.watch(lambda: cache, partial(read, tokens[:REREAD_TOKENS], length))  # long passes may replace fewer
    return plain, replaced.paths


def _by_chains(engine: BackendEngine, context: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
    """Return the logits after each token, from verifying chains in which some drafts are rejected.

    The last row is from a pass that reads the first ``REREAD_TOKENS`` tokens again.
    """
    cache, logits, place = engine.allocate(), [], 0
    engine.prefill(cache, 0, context)
    cache.slots[0].keep_states()
    for drafted, accepted in CHAINS:
        right = tokens[place + 1 : place + 1 + accepted]
        wrong = [(tokens[place] + 5 + draft) % max(2, max(tokens)) for draft in range(drafted - accepted)]
        chain = DraftTree.of(tokens[place], [*right, *wrong], list(range(-1, drafted - 1)))
        logits.append(engine.verify(cache, [chain])[0].logits[: accepted + 1].clone())
        engine.commit(cache, 0, range(accepted))
        place += accepted + 1
    logits.append(engine.prefill(cache, 0, tokens[:REREAD_TOKENS], len(context)).logits)
    return torch.cat(logits)


def _tensors_in_modules(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name and value of each module attribute that is a tensor but neither a parameter nor a buffer."""
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                yield f"{name}.{attribute}", value
