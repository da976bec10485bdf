"""The target model: a stock ``transformers`` model with three operations, prefill, verify and commit."""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch
from transformers.cache_utils import Cache, DynamicCache

from hdtool.data.errors import FamilyError, HdtoolError, reason_of
from hdtool.runtime.model.attention_masks import AttentionMasks, Mask, windows_of
from hdtool.runtime.model.cache.answer_lock import AnswerLock
from hdtool.runtime.model.cache.kept_context import KeptContext
from hdtool.runtime.model.cache.kv_cache import KVTensors, LayerShape, StaticKVCache, layer_shapes
from hdtool.runtime.model.checks.long_context import LARGEST_LENGTH, long_contexts
from hdtool.runtime.model.checks.unchanged import RecordedModel
from hdtool.runtime.model.cuda_graphs import Capture, CaptureMaker, by_device
from hdtool.runtime.model.families import (
    context_limit,
    deviation,
    is_low_precision,
    refusal,
    refuse_by_class,
    refuse_by_configuration,
    refuse_by_logits,
)
from hdtool.runtime.model.fused.layer_stack import check_layers_again, takes_number
from hdtool.runtime.model.fused.tree_pass import TreePass
from hdtool.runtime.model.fused.whole_pass import WholePass
from hdtool.runtime.model.hidden_states import hidden_in, module_of_hidden
from hdtool.runtime.model.library import cache_name, last_logits_only, use_masked_attention
from hdtool.runtime.model.llm_int8 import RowByRow
from hdtool.runtime.model.placement import device_of, scattered
from hdtool.runtime.model.quantized_layers import measure_rounding, quantized_layers, refuse_dependent_rows
from hdtool.runtime.model.static_steps import StaticSteps
from hdtool.runtime.model.step_input import TreeInput
from hdtool.runtime.tree import LARGEST_TREE, Certain, DraftTree

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NOTHING = nullcontext()
PIECE = 128
"""Rows of a pass over a prompt in compiled layers; larger passes take longer for each row."""


class Target:
    """A model that verifies draft trees.

    The root of a tree, the last emitted token, is part of the verification: its logits come first, those of the
    nodes follow in their order.
    """

    def __init__(
        self, model: PreTrainedModel, capture: CaptureMaker = by_device, shapes: Sequence[LayerShape] | None = None
    ) -> None:
        """``capture`` makes what captures steps with fixed shapes, if steps are captured on a device.

        ``shapes`` are those of the layers' keys and values where an earlier check of this model found them.
        """
        refuse_by_configuration(model.config)
        refuse_by_class(model)
        use_masked_attention(model)
        self.model = model.eval()
        self.config = model.config.get_text_config(decoder=True)
        self.device = device_of(model)
        self._is_cuda = self.device.type == "cuda"
        self.dtype: torch.dtype = model.dtype
        self.seconds_in_model = 0.0
        """Seconds spent in forward passes of the model since the target was made."""
        self.passes = 0
        """The number of these passes."""
        self.nodes_of_last_pass = -1
        """Draft tokens that the last pass verified, in a batch of the largest tree; -1 if it was that of a prompt."""
        self.slots_of_last_pass, self.seconds_of_last_pass = 1, 0.0
        self._lock = AnswerLock()
        self._capture = capture
        self.whole_pass: WholePass | None = None
        """What computes passes in the place of the model, where it can."""
        self.tree_pass: TreePass | None = None
        """What computes those over trees, with whole passes."""
        self.processes = 1
        """Processes that share the weights (tensor parallelism)."""
        self.vocabulary = embedded_tokens(model)
        """The number of token embeddings; larger ids have none."""
        self._shapes: list[LayerShape] = []
        self._cache = self.new_cache(0)
        self._kept = KeptContext(model)
        self.cached_tokens = 0
        """Tokens of the last prompt whose keys and values were in the cache."""
        self._overflow_noted = False
        self.windows = windows_of(self.config)
        self.masks = AttentionMasks(self.windows, self.dtype, self.device)
        self._tree_input = TreeInput(self.device)
        self._prefill_options = last_logits_only(model)
        self._cache_name = cache_name(model) or ""
        self._pending: list[int] = []
        """Tokens of the last pass that are part of the context without being drafted."""
        self._tree = DraftTree.bare(0)
        self._steps: StaticSteps | None = None
        self._runs = False
        """Whether a captured step was started that nobody has waited for."""
        self.hidden: torch.Tensor | None = None
        """Input of the output layer in the last pass, ``[tokens, width]``; set after ``watch_hidden``."""
        self.all_hidden = torch.empty(0)
        """The same for each slot of the pass, ``[batch, tokens, width]``."""
        self._watched = False
        self._row_by_row = RowByRow(model)
        weakref.finalize(self, self._row_by_row.release)  # the model may outlive its target
        self._rounding: float | None = None
        """Rounding of the logits in standard deviations; measured for quantized layers, and where it matters."""
        self.changes = 0
        """How often adapters, weights or hooks of the model were found changed; what it computed before is void."""
        self._recorded: RecordedModel | None = None
        self._memory: list[torch.UntypedStorage] = []
        """Memory of the weights that captured steps read: a replaced weight is not freed within an answer."""
        self._notices = True
        with self.changing():
            if shapes is None:
                self._prove()
            else:
                self._shapes = list(shapes)
                self._cache = self.new_cache(0)
        if self.captures:
            self._record()
        self.seconds_in_model, self.passes = 0.0, 0

    def _prove(self) -> None:
        """Check that the model computes trees, and that steps may be captured."""
        self._check_trees()
        if recorder := self._capture(self.device):
            self._enable_capture(recorder)

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Notice no changes of the model in this block: they are hdtool's own, and change no answer."""
        noticed, self._notices, self._recorded = self._notices, False, None
        try:
            yield
        finally:
            self._notices = noticed

    def notice_changes(self) -> None:
        """Discard what the model computed and captured if adapters, weights or hooks changed since the last prompt.

        A model with other modules or hooks is proven again, and FamilyError is raised if that fails.
        """
        if not self._notices or (self._recorded and self._recorded.is_same()):
            return
        if self._recorded:
            is_known = self._recorded.has_code_of(self.model) and self.vocabulary == embedded_tokens(self.model)
            self.forget()
            if self._steps:
                self._steps.forget()
            self._memory.clear()
            if not is_known and self.processes == 1:  # others would have to prove theirs at the same time
                self._prove_again()
            self.changes += 1
        self._record()

    def _prove_again(self) -> None:
        recorded, self._steps = self._recorded, None
        counted = self.seconds_in_model, self.passes
        self.vocabulary = embedded_tokens(self.model.eval())
        try:
            with self.changing():
                self._prove()
        except BaseException:
            self._recorded = recorded  # it is still another model at the next prompt
            raise
        finally:
            self.seconds_in_model, self.passes = counted

    def _record(self) -> None:
        self._recorded = RecordedModel(self.model)
        self._memory = self._recorded.memory() if self._steps else []

    @property
    def shapes(self) -> tuple[LayerShape, ...]:
        """Those of the keys and values of each layer."""
        return tuple(self._shapes)

    @property
    def length(self) -> int:
        """Accepted tokens in the KV cache."""
        return self._cache.length

    @property
    def captures(self) -> bool:
        """Whether steps have fixed shapes and are captured."""
        return self._steps is not None

    def new_recorder(self) -> Capture | None:
        """A Capture for passes of other modules, if the steps of the model are captured."""
        return self._capture(self.device) if self._steps else None

    def context_limit(self, prompt_length: int) -> int | None:
        return context_limit(self.config, prompt_length)

    def locked_for(self, answer: object, *, is_first: bool) -> AnswerLock:
        """Lock the model for one step of an answer; raise if another answer started since its first step."""
        self._lock.enter(answer, is_first=is_first)
        return self._lock

    @torch.inference_mode()
    def prefill(self, context: Sequence[int], room: int = 0, *, reuse: bool = False) -> torch.Tensor:
        """Prefill a context and return the logits ``[1, vocabulary]`` after it.

        ``room`` is the number of tokens that may follow. With ``reuse``, the tokens with which the last context
        begins, too, are not computed again (prefix caching).
        """
        self.wait()
        self.notice_changes()
        limit = self.context_limit(len(context))
        kept = self._kept.shared_with(context, limit) if reuse and self._is_reusable(limit) else 0
        if not kept:
            self._kept.restart(limit)
        self._provide(context, room, kept)
        logits = self._read_rest(context, kept) if kept else None
        if logits is None:
            self._kept.restart(limit)
            logits = self.read(context, self._cache)
            self._pending = list(context)
        self._tree = DraftTree.bare(context[-1])
        return logits

    def forget(self) -> None:
        """Read the next context from its start, whatever it shares with the last one."""
        self._kept.restart(None)

    def _is_reusable(self, limit: int | None) -> bool:
        """Whether a context may be read in several passes: not where a pass determines how its rows are computed.

        That is so in LLM.int8() and in a LongRoPE model beyond its original length.
        """
        return not self._row_by_row.layers and limit == self.context_limit(1)

    def reads_in_pieces(self, length: int) -> bool:
        """Whether a prompt of this length may be read in several passes into a cache that is not the target's own."""
        return not self._watched and self._is_reusable(self.context_limit(length))

    def _provide(self, context: Sequence[int], room: int, kept: int) -> None:
        """Provide capacity for a context of which the cache holds the first ``kept`` tokens."""
        needed, old = capacity_needed(context, room), self._cache
        if self._steps and kept:
            with self._kept.unfinished_from(self._settled):
                self._steps.apply_moves(old)
        if old.capacity < needed:
            if self._steps:
                needed = self._steps.capacity_for(needed, self.context_limit(len(context)))
            if not kept:
                self._cache = old = self.new_cache(0)  # frees the memory of the old one
            cache, old.length = self.new_cache(needed), kept
            cache.copy_from(old)
            self._cache = cache
        if self._steps:
            self._cache.clear_from(len(context))  # steps with fixed shapes read past the context

    def _read_rest(self, context: Sequence[int], kept: int) -> torch.Tensor | None:
        """Prefill what follows the first ``kept`` tokens; None if the model is not the one that computed them."""
        logits = torch.empty(0)

        def read(piece: list[int], first: int) -> torch.Tensor | None:
            nonlocal logits
            logits = self.read_piece(piece, first, self._cache)
            self._pending = piece
            return self._hidden_rows()

        if not self._kept.read_rest(context, kept, self._cache, read):
            return None
        self.cached_tokens = kept - 1
        if (before := self._kept.hidden()) is not None and self.hidden is not None:
            self.hidden = torch.cat([before, self.hidden])  # as if the prompt had been read in one pass
        return logits

    def _hidden_rows(self) -> torch.Tensor | None:
        return self.hidden if self._watched else None

    @property
    def _settled(self) -> int:
        """The positions of the cache that hold their own token; a captured step moves those of the last path."""
        return self._steps.settled(self._cache) if self._steps else self.length

    @torch.inference_mode()
    def recompute(self, root: int) -> torch.Tensor:
        """Verify the root without drafts, after a pass with drafts overflowed; discard what that pass wrote."""
        if self._steps:
            self._steps.apply_moves(self._cache)
        self._cache.clear_from(self.length)
        return self.verify(DraftTree.bare(root))

    def note_overflow(self) -> None:
        """Print once that logits were NaN or infinite."""
        if not self._overflow_noted:
            self._overflow_noted = True
            print(
                f"note: the model overflowed in {str(self.dtype).removeprefix('torch.')}: logits were NaN or infinite. "
                "Steps with such logits are decoded without drafts; another --dtype may avoid it",
                file=sys.stderr,
            )

    def verify(self, tree: DraftTree, *, wait: bool = True, walk: bool = False, rank: bool = False) -> torch.Tensor:
        """Verify all drafts in one pass: logits ``[1 + nodes, vocabulary]`` after the root and each node.

        The logits are valid until the next call. Without ``wait``, a captured step may still run when this returns:
        its logits are there after a call of ``wait``. With ``walk``, a compiled pass computes the walk by arg-max, too,
        and with ``rank`` what top-k needs of each row.
        """
        self._pending, self._tree = [tree.root], tree
        if self._steps:
            with self._kept.unfinished_from(self._settled):
                logits = self._captured(tree)
            if logits is not None:
                self.nodes_of_last_pass = len(tree)
                if wait:
                    self.wait()
                return logits
        if self.tree_pass:
            started = time.perf_counter()
            logits = self.tree_pass.logits(tree, self._cache, walks=walk, ranks=rank)
            if logits is not None:
                self.count_pass(time.perf_counter() - started, len(tree.tokens))
                return logits
        return self._verify_by_torch(tree)

    @torch.inference_mode()
    def _verify_by_torch(self, tree: DraftTree) -> torch.Tensor:
        mask = self.masks.of_tree(tree, self.length, reused=True)
        logits = self.run(*self._tree_input.of(tree, self.length), mask, self._cache, certain=tree.certain)[0]
        self.nodes_of_last_pass = len(tree)
        return logits

    def use_whole_passes(self, whole: WholePass | None) -> None:
        """Compute passes without the Python code of the model from now on, or with it again."""
        self.whole_pass = whole
        self.tree_pass = TreePass(whole) if whole else None

    def wait(self) -> None:
        """Wait for the captured step that still runs, if there is one."""
        if self._steps and self._runs:
            self._runs = False
            self.count_pass(self._steps.wait(), self.nodes_of_last_pass)

    @torch.inference_mode()
    def _captured(self, tree: DraftTree) -> torch.Tensor | None:
        """Verify a tree by a captured step; None if steps cannot be captured."""
        assert self._steps
        try:
            step = self._steps.prepared(tree, self._cache)
        except Exception as error:  # model code that cannot be captured raises many kinds
            self._disable_capture(reason_of(error))
            return None
        logits = step()
        self._runs = True
        if self._watched:
            self.hidden = self._steps.hidden(len(tree) + 1)
        return logits

    def commit(self, path: Sequence[int]) -> None:
        """Append the root and the nodes of ``path`` to the context; the rest of the tree is discarded."""
        fixed = len(self._pending)
        if self._steps:
            self._steps.commit(self._cache, fixed, path)
        else:
            self._cache.commit(fixed, path)
        self._keep(fixed, path)

    def _keep(self, fixed: int, path: Sequence[int]) -> None:
        """Record the tokens at the positions that were just accepted."""
        hidden = None
        if self._watched and self.hidden is not None:
            end = len(self.hidden) - len(self._tree)
            hidden = self.hidden[[*range(end - fixed, end), *(end + node for node in path)]]
        drafted = self._tree.tokens[list(path)].tolist() if path else ()
        self._kept.append([*self._pending, *drafted], hidden)

    def watch_hidden(self) -> None:
        """Set ``hidden`` in each pass from now on, for drafters that use it."""
        if self._watched:
            return

        def run() -> None:
            self.prefill(some_context(4, self.config.vocab_size))

        self.notice_changes()
        with self.changing():
            self._watch(module_of_hidden(self.model, self.model.config.model_type, run))
            run()
        if self._steps:
            self._steps.watch(lambda: self.all_hidden[0])
            self._record()

    def _watch(self, module_with_hidden: torch.nn.Module) -> None:
        mine = weakref.ref(self)  # the model may outlive its target

        def record(module: torch.nn.Module, inputs: object, returned: object) -> None:
            if (target := mine()) and (found := hidden_in(returned)) is not None:
                target.all_hidden, target.hidden = found, found[0]

        module_with_hidden.register_forward_hook(record)
        self._watched = True

    def select_slot(self, slot: int) -> None:
        """Set ``hidden`` to that of a batch slot."""
        if self._watched:
            self.hidden = self.all_hidden[slot]

    def new_cache(self, capacity: int) -> StaticKVCache:
        """A KV cache for one sequence."""
        return StaticKVCache(self.allocate(capacity))

    def allocate(self, capacity: int, batch: int = 1) -> KVTensors:
        return KVTensors.for_layers(self._shapes, capacity, batch)

    @torch.inference_mode()
    def read(self, context: Sequence[int], cache: StaticKVCache) -> torch.Tensor:
        """Prefill ``cache`` with a whole context and return the logits ``[1, vocabulary]`` after it."""
        self._check_layers_again()
        if takes_number(self.model, PIECE):
            return self._read_in_pieces(context, cache)
        cache.length = self.cached_tokens = 0
        # No mask: the model makes its own or uses a causal kernel.
        return self.forward([list(context)], [range(len(context))], None, cache, **self._prefill_options)[0, -1:]

    def _read_in_pieces(self, context: Sequence[int], cache: StaticKVCache) -> torch.Tensor:
        """The same in compiled layers, which take every pass with a mask."""
        logits, hidden = torch.empty(0), []
        for first in range(0, len(context), PIECE):
            logits = self._read_piece(context[first : first + PIECE], first, cache)
            hidden.append(self.all_hidden)
        if self._watched:
            self.all_hidden = torch.cat(hidden, 1)
            self.hidden = self.all_hidden[0]
        cache.length = self.cached_tokens = 0
        return logits

    @torch.inference_mode()
    def read_piece(self, piece: Sequence[int], first: int, cache: StaticKVCache) -> torch.Tensor:
        """Read tokens after the ``first`` ones, which ``cache`` holds; the logits ``[1, vocabulary]`` after them."""
        self._check_layers_again()
        return self._read_piece(piece, first, cache)

    def _read_piece(self, piece: Sequence[int], first: int, cache: StaticKVCache) -> torch.Tensor:
        cache.length = first
        mask = self.masks.of_continuation(len(piece), first)
        positions = range(first, first + len(piece))
        return self.forward([list(piece)], [positions], mask, cache, **self._prefill_options)[0, -1:]

    def forward(
        self, tokens: list[list[int]], positions: Sequence[Sequence[int]], mask: Mask, cache: Cache, **options: int
    ) -> torch.Tensor:
        """One pass of the model: logits ``[batch, tokens, vocabulary]``."""
        ids = torch.tensor(tokens, device=self.device)
        return self.run(ids, torch.tensor(positions, device=self.device), mask, cache, None, **options)

    def run(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        mask: Mask,
        cache: Cache,
        certain: Certain = None,
        **options: int,
    ) -> torch.Tensor:
        """One pass of the model over ids that are on its device: logits ``[batch, tokens, vocabulary]``.

        Where a token is ``certain`` after a row, the logits may be those of this token alone.
        """
        with self._row_by_row.on() if self._row_by_row.layers and mask is not None else NOTHING:
            started = time.perf_counter()
            logits = None
            if self.whole_pass:
                logits = self.whole_pass.logits(ids, positions, mask, cache, certain, last_only=bool(options))
            if logits is None:
                logits = self._pass_of_model(ids, positions, mask, cache, **options)
            if self._is_cuda:
                torch.cuda.synchronize(self.device)
            self.count_pass(time.perf_counter() - started)
        return logits

    def _pass_of_model(
        self, ids: torch.Tensor, positions: torch.Tensor, mask: Mask, cache: Cache, **options: int
    ) -> torch.Tensor:
        logits: torch.Tensor = self.model(
            input_ids=ids,
            position_ids=positions,
            attention_mask=mask,
            use_cache=True,
            return_dict=True,
            **{self._cache_name: cache},
            **options,
        ).logits
        return logits

    def _check_layers_again(self) -> None:
        check_layers_again(self.model)
        if self.whole_pass:
            self.whole_pass.check_again()

    def count_pass(self, seconds: float, nodes: int = -1, slots: int = 1) -> None:
        """Count a forward pass over trees of so many nodes in some slots; -1 nodes for any other pass."""
        self.seconds_in_model += seconds
        self.passes += 1
        self.nodes_of_last_pass, self.slots_of_last_pass, self.seconds_of_last_pass = nodes, slots, seconds

    @torch.inference_mode()
    def _check_trees(self) -> None:
        """Check on a small tree that the model follows masks and positions; raise FamilyError if it does not.

        The plain pass for comparison also gives the shapes of the KV cache.
        """
        is_quantized = bool(quantized_layers(self.model))
        # The median of the paths decides. In low precision some may differ in experts; in float32 few are enough, and
        # a row of a large model takes up to 20 ms on a CPU.
        is_rounded = is_quantized or is_low_precision(self.dtype)
        context, tree, paths = _small_tree(self.config.vocab_size, *((5, 3) if is_rounded else (3, 2)))
        used = DynamicCache(config=self.config)
        whole = torch.tensor([[*context, *path] for path in paths], device=self.device)
        try:
            options = {} if is_quantized else self._prefill_options
            plain = self.model(input_ids=whole, use_cache=True, **{self._cache_name: used}, **options).logits
            self._shapes = layer_shapes(used)
            if is_quantized:
                with self._row_by_row.on():
                    refuse_dependent_rows(self.model, self.device)
                    self._rounding = measure_rounding(self.model, whole, plain)
            self._cache = self.new_cache(len(context) + len(tree) + 1)
            self.prefill(context[:-1])
            self.commit([])
            of_tree = self.verify(tree)
        except (HdtoolError, torch.OutOfMemoryError, KeyboardInterrupt):
            raise
        except Exception as error:  # model code raises many kinds
            kind, reason = self.model.config.model_type, reason_of(error)
            raise FamilyError(
                f"models of type {kind!r} cannot be used: checking a small tree failed ({reason})"
            ) from error
        depth = len(paths[0])
        last_of_path = of_tree.view(-1, of_tree.shape[-1])[depth::depth]
        if self._rounding is None and is_low_precision(plain.dtype) and deviation(last_of_path, plain[:, -1]):
            # Some models round more than their dtype suggests, even without quantized layers.
            self._rounding = measure_rounding(self.model, whole, self.model(input_ids=whole).logits)
        refuse_by_logits(self.model.config.model_type, last_of_path, plain[:, -1], self._rounding)
        self._check_long_contexts([context[-1], *tree.tokens], used)

    def _check_long_contexts(self, tokens: Sequence[int], used: DynamicCache) -> None:
        """Check a tree after more tokens than a window has, if the model may have one beside those of the masks."""
        kind, limit = self.model.config.model_type, self.context_limit(LARGEST_LENGTH)
        for context in long_contexts(self.model, self.windows, limit):
            try:
                of_tree, plain = context.logits(self.forward, self.masks, tokens, self._shapes, used)
            except (HdtoolError, torch.OutOfMemoryError, KeyboardInterrupt):
                raise
            except Exception as error:  # model code raises many kinds
                reason = f"fails on a tree {context.found_in} ({reason_of(error)}): {context.cause}"
                raise refusal(kind, reason) from error
            if distance := deviation(of_tree, plain, self._rounding):
                reason = f"computes a tree wrongly {context.found_in} (its logits are off by {distance}): "
                raise refusal(kind, reason + context.cause)

    @torch.inference_mode()
    def _enable_capture(self, capture: Capture) -> None:
        """Use captured steps from now on, if the model can be captured and gives the same logits."""
        if reason := scattered(self.model) or self._row_by_row.reason:
            return self._disable_capture(reason)
        expected = self._two_steps()
        like = expected[0]
        self._steps = StaticSteps(self.model, self.masks, like.shape[-1], like.dtype, capture)
        if self._watched:
            self._steps.watch(lambda: self.all_hidden[0])
        # The first two are captured, and the next two replay them.
        for found, usual in zip([*self._two_steps(), *self._two_steps()], [*expected, *expected], strict=True):
            if self._steps and (distance := deviation(found, usual, self._rounding)):
                self._disable_capture(f"its logits would be off by {distance}")

    def _two_steps(self) -> list[torch.Tensor]:
        """Logits of a tree, and of the same tree after committing a path that must be moved."""
        context, tree, _ = _small_tree(self.config.vocab_size)
        self.prefill(context[:-1])
        self.commit([])
        first = self.verify(tree).clone()
        self.commit([3, 4, 5])
        return [first, self.verify(tree).clone()]

    def _disable_capture(self, reason: str) -> None:
        print(f"note: the steps of this model are not captured as CUDA graphs: {reason}", file=sys.stderr)
        if self._steps:
            self._steps.apply_moves(self._cache)
            self._steps = None


def capacity_needed(context: Sequence[int], room: int) -> int:
    """Positions for a context that grows by ``room`` tokens, and the largest tree after it."""
    return len(context) + room + LARGEST_TREE + 1


def embedded_tokens(model: PreTrainedModel) -> int:
    """The number of token embeddings; a tokenizer may have more ids."""
    number = getattr(model.get_input_embeddings(), "num_embeddings", None)
    return int(number or model.config.get_text_config(decoder=True).vocab_size)


def some_context(length: int, vocabulary: int) -> list[int]:
    """Arbitrary tokens for measurements and checks."""
    return [(7 * place + 3) % vocabulary for place in range(length)]


def _small_tree(vocabulary: int, number: int = 5, depth: int = 3) -> tuple[list[int], DraftTree, list[list[int]]]:
    """A context and a tree of equal paths; wrong masks or positions change the logits of all paths but one."""
    context = some_context(4, vocabulary)
    paths = [[(31 * path + 11 * place + 5) % vocabulary for place in range(depth)] for path in range(number)]
    tokens = [token for path in paths for token in path]
    parents = [node - 1 if node % depth else -1 for node in range(len(tokens))]
    return context, DraftTree.of(context[-1], tokens, parents), paths
