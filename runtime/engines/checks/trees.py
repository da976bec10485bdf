"""Checks that a model gives the same logits for draft trees or chains as when it decodes token by token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from transformers.cache_utils import DynamicCache

from hdtool.data.errors import FamilyError, HdtoolError, error_reason
from hdtool.runtime.caches.kv_cache import layer_shapes
from hdtool.runtime.caches.replay_slots import Replaced, TensorPath
from hdtool.runtime.caches.slots import Cache
from hdtool.runtime.caches.states import has_states, state_shapes
from hdtool.runtime.core.tolerances import aggregate_distance, distances, is_low_precision, tolerance_of
from hdtool.runtime.core.tree import DraftTree
from hdtool.runtime.engines.checks.long_context import LARGEST_LENGTH, long_contexts, sizes_of
from hdtool.runtime.engines.stock.mixers import AttentionInMixerError, find_mixers
from hdtool.runtime.engines.stock.recurrent_layers import RecurrentLayers
from hdtool.runtime.engines.stock.stock_passes import ReplayPasses, StockPasses
from hdtool.runtime.model.families import PLAIN, deviation, refusal, refuse_by_logits
from hdtool.runtime.model.quantization import measure_rounding, quantized_layers, refuse_dependent_rows
from hdtool.runtime.model.transformers_internals import cache_in, first_logits

if TYPE_CHECKING:
    from hdtool.runtime.engines.target import Target


def some_context(length: int, vocabulary: int) -> list[int]:
    """Return ``length`` arbitrary token ids for measurements and checks."""
    return [(7 * place + 3) % vocabulary for place in range(length)]


def small_tree(
    vocabulary: int, number: int = 5, depth: int = 3, length: int = 4
) -> tuple[list[int], DraftTree, list[list[int]]]:
    """Return ``(context, tree, paths)``; ``tree`` consists of ``number`` separate ``paths`` of ``depth`` nodes each.

    The context has ``length`` tokens, of which the last is the root. If a model ignores masks or positions, the logits
    of all paths but the first are wrong.
    """
    context = some_context(length, vocabulary)
    paths = [[(31 * path + 11 * place + 5) % vocabulary for place in range(depth)] for path in range(number)]
    tokens = [token for path in paths for token in path]
    parents = [node - 1 if node % depth else -1 for node in range(len(tokens))]
    return context, DraftTree.of(context[-1], tokens, parents), paths


CONTEXT, FIRST_PART = 13, 5
"""Context length of the check, and length of the context's first part; both lengths exceed the size of convolutions."""
PATHS, DEPTH = 3, 2


@torch.inference_mode()
def prove_recurrent_trees(target: Target) -> None:
    """Check that a model with recurrent layers verifies trees correctly; raise a ``FamilyError`` if not.

    Set the target's shapes, recurrent layers, rounding and ``continues``.
    """
    kind = target.model.config.model_type
    try:
        expected = _find_recurrences(target)
        distance = _distance(target, expected)
    except AttentionInMixerError as error:
        raise refusal(kind, f"has layers that cannot be computed over a tree: {error}") from error
    except (HdtoolError, torch.OutOfMemoryError, KeyboardInterrupt):
        raise
    except Exception as error:  # model code may raise any error
        raise refusal(kind, f"fails on a small tree ({error_reason(error)})") from error
    if not distance <= _tolerance(target):
        raise refusal(kind, f"computes a tree wrongly after a recurrence (its logits are off by {distance:.2g} sigma)")
    target.continues = _continues(target, expected)


class Expected(NamedTuple):
    """Reference logits, computed by the model's own code."""

    of_rows: list[torch.Tensor]
    """Logits after the root of the small tree and after each depth of its paths, shape ``[paths, vocabulary]``."""
    of_context: torch.Tensor
    """Logits after the context and the root, read in one pass."""


def _find_recurrences(target: Target) -> Expected:
    """Set the target's recurrent layers and cache shapes; return the expected logits."""
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
    """Return the largest distance between actual and expected logits for the small tree.

    Keep using closed forms if their distance is within the tolerance, otherwise run mixers level by level from now on.
    """
    recurrent = target.stock.recurrent
    assert recurrent
    if recurrent.has_closed_forms:
        try:
            distance = _distance_of_tree(target, expected)
            if distance <= _tolerance(target):
                return distance
        except (torch.OutOfMemoryError, KeyboardInterrupt):
            raise
        except Exception:  # code that calls the replaced functions in another way
            pass
        recurrent.use_levels()
    return _distance_of_tree(target, expected)


def _tolerance(target: Target) -> float:
    return max(tolerance_of(target.dtype, strict=True), 2 * (target.rounding or 0))


def _small_tree(target: Target) -> tuple[list[int], DraftTree, list[list[int]]]:
    return small_tree(target.config.vocab_size, PATHS, DEPTH, CONTEXT)


def _plain(target: Target, tokens: Sequence[Sequence[int]], cache: DynamicCache, start: int = 0) -> torch.Tensor:
    """Return the logits that the model's own code gives after each row; ``cache`` already has ``start`` tokens."""
    positions = [range(start, start + len(row)) for row in tokens]
    return target.stock.forward([list(row) for row in tokens], positions, None, cache)[:, -1]


def _distance_of_tree(target: Target, expected: Expected) -> float:
    """Return the largest distance from the expected logits, over the small tree and a second pass after a commit."""
    context, tree, paths = _small_tree(target)
    cache = target.allocate()
    target.prefill(cache, 0, context[:-1], room=2 * len(tree))
    of_tree = target.verify(cache, [tree])[0].logits.clone()
    of_paths = of_tree[1:].view(PATHS, DEPTH, -1)
    actual = [of_tree[:1].expand(PATHS, -1), *of_paths.unbind(1)]
    target.commit(cache, 0, [DEPTH])  # the first node of the second path, so that positions move and states advance
    again = target.verify(cache, [DraftTree.bare(paths[1][1])])[0].logits
    distance = max(_between(target, *pair) for pair in zip(actual, expected.of_rows, strict=True))
    return max(distance, _between(target, again[-1:], expected.of_rows[-1][1:2]))


def _between(target: Target, actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest of the rows' distances from the expected logits.

    In low precision and with quantized layers, return the median, because a row may be routed to other experts.
    """
    # Some models in low precision return logits in float32.
    is_rounded = target.rounding is not None or is_low_precision(target.dtype)
    return aggregate_distance(distances(actual, expected), is_rounded=is_rounded)


def _continues(target: Target, expected: Expected) -> bool:
    """Return True if a pass over several tokens continues correctly from the states of earlier passes.

    Reading the last token separately must also give the logits of a single pass over the context, since the layers of
    some models compute several tokens differently from a single one.
    """
    context, _, _ = _small_tree(target)
    cache = target.allocate()
    target.prefill(cache, 0, context[:FIRST_PART], room=len(context))
    try:
        in_parts = target.prefill(cache, 0, context[FIRST_PART:], FIRST_PART).logits
    except (torch.OutOfMemoryError, KeyboardInterrupt):
        raise
    except Exception:  # model code that can only start at the first token
        return False
    gaps = [_between(target, logits, expected.of_context) for logits in (in_parts, expected.of_rows[0][:1])]
    return all(distance <= _tolerance(target) for distance in gaps)


MIN_CONTEXT, MAX_CONTEXT = 24, 288
"""Minimum and maximum context length of the check, which exceeds window or block sizes of up to their difference."""
CHAINS = ((4, 2), (3, 3), (5, 0), (2, 1), (0, 0), (4, 4), (6, 1))
"""Pairs ``(drafted, accepted)``: the number of drafted and of accepted tokens in each pass of the check."""
DECODED_TOKENS = sum(1 + accepted for _, accepted in CHAINS)
REREAD_TOKENS = 3
"""Number of tokens read again after all chains, continuing the cache that was kept after the context."""


def prove_chains(target: Target, no_trees: FamilyError) -> ReplayPasses:
    """Return the ``ReplayPasses`` of a model that cannot verify trees; raise a ``FamilyError`` if chains fail as well.

    ``no_trees`` says why trees fail. Chains must give the logits of token-by-token decoding.
    """
    model, stock = target.model, target.stock
    if stock.row_by_row.layers:
        raise no_trees
    if quantized_layers(model):
        refuse_dependent_rows(model, target.device)
    context, tokens = _context(target), some_context(DECODED_TOKENS, target.config.vocab_size)
    before = dict(_tensors_in_modules(model))
    try:
        # Tensor versions show what a pass changes in place; inference mode doesn't track them.
        with torch.inference_mode(False), torch.no_grad():
            plain, paths = _token_by_token(stock, context, tokens)
        passes = ReplayPasses(stock, paths)
        actual = _by_chains(passes, context, tokens)
        numbered, in_parts = _distances_of_prompt(stock, context)
    except (HdtoolError, torch.OutOfMemoryError, KeyboardInterrupt):
        raise
    except Exception as error:  # model code may raise any error
        raise _refused(no_trees, f"it fails on a chain of drafts ({error_reason(error)})") from error
    gaps = distances(actual, torch.cat([plain, plain[REREAD_TOKENS - 1 : REREAD_TOKENS]]))
    distance = aggregate_distance(gaps, is_rounded=is_low_precision(target.dtype))
    tolerance = tolerance_of(target.dtype, strict=True)
    if not distance <= tolerance:
        changed = next((name for name, tensor in _tensors_in_modules(model) if before.get(name) is not tensor), None)
        place = f"{changed} is a state outside of the cache" if changed else "its passes over several tokens are wrong"
        raise _refused(no_trees, f"a chain of drafts is off by {distance:.2g} sigma: {place}")
    if not numbered <= tolerance:
        raise _refused(no_trees, "it numbers positions in another way than 0, 1, 2, …")
    target.continues = target.continues and in_parts <= tolerance
    return passes


@torch.inference_mode()
def _distances_of_prompt(stock: StockPasses, context: Sequence[int]) -> tuple[float, float]:
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
    return FamilyError(f"{no_trees}; {reason}. {PLAIN}")


def _context(target: Target) -> list[int]:
    """Return a context, longer than the configured windows and state sizes unless these are too large to check."""
    sizes = [size for _, size in sizes_of(vars(target.config)) if size + MIN_CONTEXT <= MAX_CONTEXT]
    length, limit = max(sizes, default=0) + MIN_CONTEXT, target.context_limit(1)
    if limit is not None:
        length = max(1, min(length, limit - DECODED_TOKENS - max(drafted for drafted, _ in CHAINS)))
    return some_context(length + 1, target.config.vocab_size)[1:]


def _token_by_token(
    stock: StockPasses, context: Sequence[int], tokens: Sequence[int]
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


def _by_chains(passes: ReplayPasses, context: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
    """Return the logits after each token, from verifying chains in which some drafts are rejected.

    The last row is from a pass that reads the first ``REREAD_TOKENS`` tokens again.
    """
    cache, logits, place = passes.allocate(1), [], 0
    passes.prefill(cache, 0, context, 0)
    cache.slots[0].keep_states()
    for drafted, accepted in CHAINS:
        right = tokens[place + 1 : place + 1 + accepted]
        wrong = [(tokens[place] + 5 + draft) % max(2, max(tokens)) for draft in range(drafted - accepted)]
        chain = DraftTree.of(tokens[place], [*right, *wrong], list(range(-1, drafted - 1)))
        logits.append(passes.verify_alone(cache, 0, chain).logits[: accepted + 1].clone())
        cache.slots[0].commit(range(accepted))
        place += accepted + 1
    logits.append(passes.prefill(cache, 0, tokens[:REREAD_TOKENS], len(context)).logits)
    return torch.cat(logits)


def _tensors_in_modules(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name and value of each module attribute that is a tensor but neither a parameter nor a buffer."""
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                yield f"{name}.{attribute}", value


@torch.inference_mode()
def prove_trees(target: Target) -> None:
    """Check that a target's model respects masks and positions; raise a ``FamilyError`` if not.

    The plain pass for comparison also determines the target's KV cache shapes and the rounding error of its logits.
    """
    model, kind = target.model, target.model.config.model_type
    is_quantized = bool(quantized_layers(model))
    # The median over paths decides. In low precision, some paths may be routed to other experts. In float32 few paths
    # are enough, which saves time: a row of a large model takes up to 20 ms on a CPU.
    is_rounded = is_quantized or is_low_precision(target.dtype)
    context, tree, paths = small_tree(target.config.vocab_size, *((5, 3) if is_rounded else (3, 2)))
    try:
        used = DynamicCache(config=target.config)
    except Exception as error:  # a configuration with parts, none of which is a decoder
        raise refusal(
            kind, f"has a configuration of which the library makes no cache ({error_reason(error)})"
        ) from error
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
    except Exception as error:  # model code may raise any error
        reason = error_reason(error)
        raise FamilyError(f"models of type {kind!r} cannot be used: checking a small tree failed ({reason})") from error
    depth = len(paths[0])
    last_of_path = of_tree.view(-1, of_tree.shape[-1])[depth::depth]
    if target.rounding is None and is_low_precision(plain.dtype) and deviation(last_of_path, plain[:, -1]):
        # Some models round more than their dtype suggests, even without quantized layers.
        target.rounding = measure_rounding(model, whole, model(input_ids=whole).logits)
    refuse_by_logits(kind, last_of_path, plain[:, -1], target.rounding)
    _check_long_contexts(target, [context[-1], *tree.tokens], used)


def _check_long_contexts(target: Target, tokens: Sequence[int], used: DynamicCache) -> None:
    """Check a tree after contexts longer than any window that the model may apply in addition to hdtool's masks."""
    kind, limit = target.model.config.model_type, target.context_limit(LARGEST_LENGTH)
    for context in long_contexts(target.model, target.stock.windows, limit):
        try:
            of_tree, plain = context.logits(target.stock.forward, target.stock.masks, tokens, target.shapes, used)
        except (HdtoolError, torch.OutOfMemoryError, KeyboardInterrupt):
            raise
        except Exception as error:  # model code may raise any error
            reason = f"fails on a tree {context.found_in} ({error_reason(error)}): {context.cause}"
            raise refusal(kind, reason) from error
        if distance := deviation(of_tree, plain, target.rounding):
            reason = f"computes a tree wrongly {context.found_in} (its logits are off by {distance}): "
            raise refusal(kind, reason + context.cause)


def two_steps(target: Target, cache: Cache) -> list[torch.Tensor]:
    """Return the logits of two passes over a tree, with a commit in between that moves cache positions."""
    context, tree, _ = small_tree(target.config.vocab_size)
    target.prefill(cache, 0, context[:-1], room=2 * len(tree))
    first = target.verify(cache, [tree])[0]
    logits = [first.logits.clone()]
    target.commit(cache, 0, [3, 4, 5])
    second = target.verify(cache, [tree])[0]
    return [*logits, second.logits.clone()]
