"""Checks that a model verifies chains of drafts from a kept cache as it decodes token by token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from hdtool.data.errors import FamilyError, HdtoolError, reason_of
from hdtool.runtime.model.cache.library_copies import Place, Replaced
from hdtool.runtime.model.checks.long_context import sizes_of
from hdtool.runtime.model.checks.small_tree import some_context
from hdtool.runtime.model.families import PLAIN, decisive, distances, is_low_precision, tolerance_of
from hdtool.runtime.model.library import cache_in, first_logits
from hdtool.runtime.model.quantized_layers import quantized_layers, refuse_dependent_rows
from hdtool.runtime.model.replay_passes import ReplayPasses
from hdtool.runtime.model.stock_passes import StockPasses
from hdtool.runtime.tree import DraftTree

if TYPE_CHECKING:
    from hdtool.runtime.model.target import Target

LEAST_CONTEXT, MOST_CONTEXT = 24, 288
"""Tokens of the context of the check, which are more than a window or a block has unless it is larger than this."""
CHAINS = ((4, 2), (3, 3), (5, 0), (2, 1), (0, 0), (4, 4), (6, 1))
"""Drafts of each pass, and how many of them are accepted."""
DECODED = sum(1 + accepted for _, accepted in CHAINS)
READ_AGAIN = 3
"""Tokens of a pass from the cache after the context, once all chains were verified."""


def prove_chains(target: Target, no_trees: FamilyError) -> ReplayPasses:
    """The passes over chains of a model that verifies no trees, for a reason; raise FamilyError if they fail, too."""
    model, stock = target.model, target.stock
    if stock.row_by_row.layers:
        raise no_trees
    if quantized_layers(model):
        refuse_dependent_rows(model, target.device)
    context, tokens = _context(target), some_context(DECODED, target.config.vocab_size)
    before = dict(_tensors_in_modules(model))
    try:
        # Versions of tensors tell what a pass changes in place, and inference mode has none.
        with torch.inference_mode(False), torch.no_grad():
            plain, places = _token_by_token(stock, context, tokens)
        passes = ReplayPasses(stock, places)
        found = _by_chains(passes, context, tokens)
        numbered, in_parts = _distances_of_prompt(stock, context)
    except (HdtoolError, torch.OutOfMemoryError, KeyboardInterrupt):
        raise
    except Exception as error:  # model code raises many kinds
        raise _refused(no_trees, f"it fails on a chain of drafts ({reason_of(error)})") from error
    each = distances(found, torch.cat([plain, plain[READ_AGAIN - 1 : READ_AGAIN]]))
    distance = decisive(each, is_rounded=is_low_precision(target.dtype))
    tolerance = tolerance_of(target.dtype, strict=True)
    if not distance <= tolerance:
        changed = next((name for name, one in _tensors_in_modules(model) if before.get(name) is not one), None)
        place = f"{changed} is a state outside of the cache" if changed else "its passes over several tokens are wrong"
        raise _refused(no_trees, f"a chain of drafts is off by {distance:.2g} sigma: {place}")
    if not numbered <= tolerance:
        raise _refused(no_trees, "it numbers positions in another way than 0, 1, 2, …")
    target.continues = target.continues and in_parts <= tolerance
    return passes


@torch.inference_mode()
def _distances_of_prompt(stock: StockPasses, context: Sequence[int]) -> tuple[float, float]:
    """How far logits after a prompt are from those of ``generate``, and from those of a prompt read in two parts.

    ``generate`` may number positions in another way. Parts differ where a prompt is attended to in both directions.
    """
    ids = torch.tensor([list(context)], device=stock.device)
    positions, middle = torch.arange(len(context), device=stock.device)[None], len(context) // 2
    whole = stock.call(ids, positions, None, None).logits[:, -1]
    try:
        by_library = first_logits(stock.model, ids)
    except Exception:  # a forward of another kind, which generate cannot call
        by_library = whole
    first = cache_in(stock.call(ids[:, :middle], positions[:, :middle], None, None))
    in_parts = stock.call(ids[:, middle:], positions[:, middle:], None, first).logits[:, -1]
    return float(distances(whole, by_library)), float(distances(in_parts, whole))


def _refused(no_trees: FamilyError, reason: str) -> FamilyError:
    return FamilyError(f"{no_trees}; {reason}. {PLAIN}")


def _context(target: Target) -> list[int]:
    """As many tokens as the largest size that the model names, or the largest that is not too large, and some more."""
    sizes = [size for _, size in sizes_of(vars(target.config)) if size + LEAST_CONTEXT <= MOST_CONTEXT]
    length, limit = max(sizes, default=0) + LEAST_CONTEXT, target.context_limit(1)
    if limit is not None:
        length = max(1, min(length, limit - DECODED - max(drafted for drafted, _ in CHAINS)))
    return some_context(length + 1, target.config.vocab_size)[1:]


def _token_by_token(
    stock: StockPasses, context: Sequence[int], tokens: Sequence[int]
) -> tuple[torch.Tensor, frozenset[Place]]:
    """Logits after each of the tokens, and the places in the cache that passes replace."""
    found: list[torch.Tensor] = []
    cache: Any = None

    def read(new: Sequence[int], start: int) -> None:
        nonlocal cache
        ids = torch.tensor([list(new)], device=stock.device)
        output = stock.call(ids, torch.arange(start, start + len(new), device=stock.device)[None], None, cache)
        cache = cache_in(output)
        found.append(output.logits[0, -1].clone())

    read(context, 0)
    replaced, length = Replaced(), len(context)
    for token in tokens:
        replaced.watch(lambda: cache, partial(read, [token], length))
        length += 1
    plain = torch.stack(found[1:])
    replaced.watch(lambda: cache, partial(read, tokens[:READ_AGAIN], length))  # several tokens may replace less
    return plain, replaced.places


def _by_chains(passes: ReplayPasses, context: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
    """Logits after each token by chains of which some drafts are rejected, and again those after the first few."""
    cache, found, place = passes.allocate(1), [], 0
    passes.prefill(cache, 0, context, 0)
    cache.slots[0].keep_states()
    for drafted, accepted in CHAINS:
        right = tokens[place + 1 : place + 1 + accepted]
        wrong = [(tokens[place] + 5 + draft) % max(2, max(tokens)) for draft in range(drafted - accepted)]
        chain = DraftTree.of(tokens[place], [*right, *wrong], list(range(-1, drafted - 1)))
        found.append(passes.verify_alone(cache, 0, chain).logits[: accepted + 1].clone())
        cache.slots[0].commit(range(accepted))
        place += accepted + 1
    found.append(passes.prefill(cache, 0, tokens[:READ_AGAIN], len(context)).logits)
    return torch.cat(found)


def _tensors_in_modules(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors that are attributes of modules, and neither parameters nor buffers."""
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                yield f"{name}.{attribute}", value
