"""Chooses how to compute a model's passes over draft trees, captures them as CUDA graphs and checks their logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from hdtool.data.errors import error_reason
from hdtool.data.notes import note
from hdtool.runtime.caches.accepted_path_moves import move_on_device
from hdtool.runtime.caches.kv_cache import KVTensors
from hdtool.runtime.caches.slots import Cache
from hdtool.runtime.caches.transformers_views import IndexedKVCache
from hdtool.runtime.core.engine_interface import PassOptions
from hdtool.runtime.core.tree import LARGEST_TREE, DraftTree
from hdtool.runtime.engines.backend import Backend, BackendEngine, RunningPass
from hdtool.runtime.engines.capturable_pass import StepOutput, StepPass
from hdtool.runtime.engines.captured.fused_pass import fuse, triton_operations
from hdtool.runtime.engines.captured.static_steps import StaticSteps
from hdtool.runtime.engines.captured.transformers_attention import TreeAttention
from hdtool.runtime.engines.captured_functions import is_out_of_memory, note_uncaptured
from hdtool.runtime.engines.proofs.probes import two_steps
from hdtool.runtime.engines.reference.program_pass import ProgramPass
from hdtool.runtime.model.devices import not_on_one_device_reason
from hdtool.runtime.model.pass_inputs import AttentionMask
from hdtool.runtime.model.refusals import context_limit, deviation

if TYPE_CHECKING:
    from hdtool.runtime.engines.captured_functions import Capture
    from hdtool.runtime.engines.reference.tree_recurrences import StackedStates
    from hdtool.runtime.engines.stock.model_facts import ModelFacts
    from hdtool.runtime.engines.stock.recurrent_layers import RecurrentLayers
    from hdtool.runtime.engines.stock.stock_model import StockModel
    from hdtool.runtime.engines.stock.tree_passes import TreePasses
    from hdtool.runtime.model.pass_inputs import StepTensors


class TransformersPass:
    """A pass over draft trees through transformers' layers, optionally with hdtool's own attention.

    hdtool's ``attention`` reads only the slots' contexts. Without it, the attention of transformers reads a fixed
    extent of the cache, and the mask hides positions after the contexts.
    """

    def __init__(
        self, stock: StockModel, recurrent: RecurrentLayers | None, attention: TreeAttention | None = None
    ) -> None:
        self._stock, self._recurrent, self._attention = stock, recurrent, attention
        self.reads_extent = attention is None

    def run(self, step: StepTensors, storage: KVTensors, extent: int) -> StepOutput:
        if self._attention is None:
            move_on_device(storage.tensors, step.moved_to, step.moved_from)
            masks = self._stock.masks.on_device(step.ancestor_mask, step.positions, step.length, extent)
            return self._pass(step, storage, masks, extent)
        with self._attention.replacing(self._stock.model, step) as masks:
            self._attention.move(storage.tensors)
            output = self._pass(step, storage, masks, storage.capacity)
        if not self._attention.calls:
            raise NotImplementedError("layers that do not look their attention up")
        return output

    def _pass(self, step: StepTensors, storage: KVTensors, masks: AttentionMask, extent: int) -> StepOutput:
        stock = self._stock
        indices = step.length[:, None] + torch.arange(step.tokens.shape[1], device=step.length.device)
        cache = IndexedKVCache(storage, indices, extent)
        options: dict[str, Any] = {"attention_mask": masks, "use_cache": True, "return_dict": True}
        if stock.takes_positions:
            options["position_ids"] = step.positions
        with self._over(step, storage) as states:
            logits: torch.Tensor = stock.model(input_ids=step.tokens, **options, **{stock.cache_name: cache}).logits
        hidden = stock.hidden.last_pass if stock.hidden.is_watched else None
        return StepOutput(logits.flatten(0, 1), hidden, states() if states else None)

    def _over(
        self, step: StepTensors, storage: KVTensors
    ) -> AbstractContextManager[Callable[[], StackedStates] | None]:
        """Return a context manager that makes recurrent layers process the step's trees instead of sequences.

        It yields a function that returns the pass's ``StackedStates``; for a model without states, it yields None.
        """
        recurrent = self._recurrent
        return recurrent.over_step(step, storage.states) if recurrent and storage.states else nullcontext()


def transformers_passes(stock: StockModel, facts: ModelFacts) -> Iterator[TransformersPass]:
    """Yield each ``TransformersPass`` to try to capture, the fastest first."""
    operations, windows = triton_operations(stock.device), stock.windows
    selects = any(shape.indexer for shape in facts.shapes)  # through the mask, which hdtool's attention ignores
    if operations and not selects and not any(window.chunk for window in windows):
        yield TransformersPass(stock, facts.recurrent, TreeAttention(operations, windows))
    yield TransformersPass(stock, facts.recurrent)


NOT_CAPTURED = "the steps of this model are not captured as CUDA graphs"
RESERVED_SHARE = 1 / 8
"""Share of the GPU memory left free after loading that a cache reserves at once.

A cache that grows is allocated anew, and all steps must then be captured again.
"""


class CapturedPasses(Backend):
    """Verifies trees by steps that are captured on a device; computes nothing before ``enable``, or if that fails."""

    captures = True

    def __init__(self, stock: StockModel, facts: ModelFacts) -> None:
        self._stock, self._facts = stock, facts
        self.steps: StaticSteps | None = None
        self._passes: list[StepPass] = []
        """The pass that is captured, followed by its fallbacks."""
        self._lost = ""
        """Why hdtool's own pass was given up; empty if it wasn't, or once a note has said so."""

    @property
    def is_current(self) -> bool:
        return self.steps is not None

    @property
    def is_fused(self) -> bool:
        """True if hdtool's own pass is captured rather than a pass through transformers' layers."""
        return bool(self._passes) and isinstance(self._passes[0], ProgramPass)

    @property
    def proven(self) -> StepPass | None:
        """The pass that is captured; None if there is none."""
        return self._passes[0] if self.steps else None

    @torch.inference_mode()
    def enable(self, capture: Capture, trees: TreePasses, cache: Cache) -> None:
        """Try to capture steps; from now on, use them if their logits match those of ``trees``, the uncaptured passes.

        If a pass has other logits, the next pass is tried. The check uses ``cache``, whose contents are lost.
        """
        stock, facts = self._stock, self._facts
        if reason := not_on_one_device_reason(stock.model) or stock.row_by_row.reason:
            return note(f"{NOT_CAPTURED}: {reason}")
        self._passes = passes_of(stock, facts)
        operations = triton_operations(stock.device)
        run_races, reserved = operations.run_races if operations else None, reserved_positions(stock, facts)
        steps = StaticSteps(self._passes[0], capture, stock.device, reserved, run_races)
        cache.reserve(1, steps.capacity_for(1, context_limit(stock.config, 1)))
        vocabulary = stock.config.vocab_size
        expected = two_steps(BackendEngine([], trees, stock.log), vocabulary, cache)
        self.steps, captured = steps, BackendEngine([self], trees, stock.log)
        while self.steps:
            proven = self._passes[0]
            # The first two steps are captured, and the next two replayed.
            actual = [*two_steps(captured, vocabulary, cache), *two_steps(captured, vocabulary, cache)]
            if self._passes[:1] != [proven]:
                continue  # capturing it failed, and the next pass replaced it
            if not steps.holds_results:  # the logits are those of uncaptured steps
                self._give_up("there is not enough GPU memory")
                continue
            pairs = zip(actual, [*expected, *expected], strict=True)
            distance = next(filter(None, (deviation(*pair, facts.rounding) for pair in pairs)), "")
            if not distance:
                break
            self._give_up(f"its logits would be off by {distance}")
        cache.slots[0].cut(0)

    @torch.inference_mode()
    def record(self, cache: Cache) -> None:
        """Capture the steps over a cache's slots before they are first used, as far as memory allows.

        Steps that read a fixed extent are captured when first used, since there is one per extent. If capturing fails
        for another reason than memory, fall back to the next pass.
        """
        if self.steps and not self._passes[0].reads_extent:
            try:
                cache.reserve(LARGEST_TREE + 1, self.capacity_for(LARGEST_TREE + 1, 1, len(cache.slots)))
                self.steps.record(cache)
            except Exception as error:  # see ``launch``
                if not is_out_of_memory(error):
                    self._give_up(error_reason(error))

    def _give_up(self, reason: str) -> None:
        """Fall back to the next pass, or disable capturing and print a note if none is left."""
        if self.is_fused:
            self._lost = reason
        del self._passes[0]
        if self.steps and self._passes:
            self.steps.use(self._passes[0])
        else:
            self.steps, self._passes, self._lost = None, [], ""
            note(f"{NOT_CAPTURED}: {reason}")

    def renew(self) -> None:
        """Release all captured steps, so that they are captured again with the model's current weights."""
        if self.steps:
            if self.is_fused:
                self._passes = passes_of(self._stock, self._facts)
            self.steps.use(self._passes[0])

    def watch_hidden(self, layers: tuple[int, ...]) -> None:
        if layers:
            self.renew()
        else:
            self.forget()

    def forget(self) -> None:
        """Release all captured steps; each is captured again when next used."""
        if self.steps:
            self.steps.forget()

    def capacity_for(self, needed: int, context: int, slots: int) -> int:
        """Return one of a few fixed capacities, so that few steps are captured."""
        assert self.steps
        return self.steps.capacity_for(needed, context_limit(self._stock.config, context), slots)

    @torch.inference_mode()
    def launch(self, cache: Cache, trees: Sequence[DraftTree], options: Sequence[PassOptions]) -> RunningPass | None:
        """Start to verify trees; return None if the step does not fit into memory, or cannot be captured any more."""
        while self.steps:
            try:
                start = self.steps.prepared(cache, trees, options)
            except Exception as error:  # model code that cannot be captured may raise any error
                if any(slot.kv.settled < slot.length for slot in cache.slots[: len(trees)]):
                    raise  # a move of accepted positions was interrupted, which no other pass can undo
                if is_out_of_memory(error):
                    note_uncaptured()
                    return None
                self._give_up(error_reason(error))
            else:
                if self._lost:
                    note(
                        f"hdtool's own pass is not used for this model, whose steps are slower without it: {self._lost}"
                    )
                    self._lost = ""
                return start() if start else None
        return None


def reserved_positions(stock: StockModel, facts: ModelFacts) -> int:
    """Return how many cache positions fit into ``RESERVED_SHARE`` of a GPU's free memory; 0 on other devices."""
    shapes = [shape for layer in facts.shapes for shape in layer.kept]
    each = sum(shape.heads * shape.width * shape.dtype.itemsize for shape in shapes)
    if stock.device.type != "cuda" or not each:
        return 0
    free, _ = torch.cuda.mem_get_info(stock.device)
    return int(RESERVED_SHARE * free) // each


def passes_of(stock: StockModel, facts: ModelFacts) -> list[StepPass]:
    """Return the passes to try to capture, the fastest first; print a note if memory is too short for hdtool's own."""
    try:
        fused = fuse(stock, facts)
    except torch.OutOfMemoryError:
        fused = None
        note("there is not enough GPU memory to merge weights for hdtool's own pass, so that steps are slower")
    return [*filter(None, [fused]), *transformers_passes(stock, facts)]
