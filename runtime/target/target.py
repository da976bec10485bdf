"""The target model: a stock ``transformers`` model as an engine, with captured or compiled passes where possible."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from threading import Lock
from typing import TYPE_CHECKING

import torch

from hdtool.data.errors import FamilyError
from hdtool.data.notes import note
from hdtool.runtime.caches.slots import Cache
from hdtool.runtime.core.tolerances import distances, tolerance_of
from hdtool.runtime.engines.backend import MIN_GROWTH, BackendEngine, StockBackend
from hdtool.runtime.engines.captured_functions import Capture, CaptureMaker
from hdtool.runtime.engines.proofs.probes import some_context
from hdtool.runtime.engines.stock.forward_lock import forward_lock
from hdtool.runtime.engines.stock.model_facts import ModelFacts
from hdtool.runtime.engines.stock.stock_model import StockModel, embedded_tokens
from hdtool.runtime.engines.stock.tree_passes import TreePasses
from hdtool.runtime.model.refusals import context_limit, refuse_by_class, refuse_by_configuration
from hdtool.runtime.model.transformers_internals import use_masked_attention
from hdtool.runtime.model.weight_changes import ModelChanges
from hdtool.runtime.weights.damaged_weights import refuse_damaged_model

if TYPE_CHECKING:
    from torch.nn import Module
    from transformers import PreTrainedModel

    from hdtool.runtime.engines.captured.captured_passes import CapturedPasses
    from hdtool.runtime.engines.captured.ranking_passes import RankingPasses
    from hdtool.runtime.engines.cpu.compiled_model import CompiledModel
    from hdtool.runtime.engines.reference.drafter_layers import DrafterLayers
    from hdtool.runtime.model.pass_inputs import AttentionWindow
    from hdtool.runtime.program.model_parts import EngineSupport, ModelParts


def by_device(device: torch.device) -> Capture | None:
    """Return ``CudaGraphs`` for CUDA devices, and None for others, where steps without padding are faster."""
    if device.type != "cuda":
        return None
    from hdtool.runtime.engines.cuda.cuda_graphs import CudaGraphs

    return CudaGraphs(device)


class Target(BackendEngine):
    """A ``transformers`` model that reads prompts, verifies draft trees and commits accepted paths."""

    def __init__(
        self, model: PreTrainedModel, capture: CaptureMaker = by_device, facts: ModelFacts | None = None
    ) -> None:
        """Check that the model can verify trees, or else chains; raise a ``FamilyError`` if it can do neither.

        If damaged weights are the cause, raise a ``ModelError``. ``capture`` returns the ``Capture`` for a device, or
        None if steps aren't captured on it. ``facts`` are known from an earlier check; if given, the model isn't
        checked again and its steps aren't captured.
        """
        refuse_by_configuration(model.config)
        refuse_by_class(model)
        use_masked_attention(model)
        self.model = model.eval()
        self.stock = StockModel(model)
        self.config, self.device, self.dtype = self.stock.config, self.stock.device, self.stock.dtype
        self.hidden, self.facts = self.stock.hidden, facts or ModelFacts()
        super().__init__([], TreePasses(self.stock, self.facts), self.stock.log)
        weakref.finalize(self, self.stock.row_by_row.release)  # the model may outlive its target
        self.vocabulary = embedded_tokens(model)
        """Number of token embeddings; every token id must be less than this."""
        self.processes = 1
        """Number of processes that share the weights (tensor parallelism)."""
        self.busy = Lock()
        """Held during each decoding step, so that only one thread at a time uses the model."""
        self.compiled: CompiledModel | None = None
        """Passes in compiled code, if they are used; see ``compile``."""
        self.captured: CapturedPasses | None = None
        """Steps captured on the device, if they are used."""
        self._capture = capture
        self._overflow_noted = False
        self._first_logits: torch.Tensor | None = None
        """Logits after a single token, to detect weight changes that torch doesn't track."""
        self._changes = ModelChanges(model)
        self._own_cache: Cache | None = None
        if not facts:
            with forward_lock(model), self.changing(), self.log.unchanged():
                self._prove()
        if self.captures:
            self._changes.record(holds_memory=True)

    def _prove(self, known: ModelFacts | None = None) -> None:
        """Check what the model can do, and capture steps if possible; ``known`` are its facts before it changed."""
        from hdtool.runtime.engines.proofs.tree_proof import prove

        try:
            facts = prove(self.stock, known)
        except FamilyError:
            refuse_damaged_model(self.model)
            raise
        self.facts, self.captured = facts, None
        if facts.no_trees:
            from hdtool.runtime.engines.stock.chain_passes import ChainPasses

            return self._arrange(ChainPasses(self.stock, facts))
        trees = TreePasses(self.stock, facts)
        self._arrange(trees)
        # Passes that run level by level have shapes that depend on the tree.
        is_regular = facts.recurrent is None or facts.recurrent.can_be_captured
        if is_regular and (capture := self._capture(self.device)):
            self._capture_steps(capture, trees)

    def _capture_steps(self, capture: Capture, trees: TreePasses) -> None:
        from hdtool.runtime.engines.captured.captured_passes import CapturedPasses

        self.captured = CapturedPasses(self.stock, self.facts)
        self._arrange(trees)
        # An answer may still need the contents of the target's own cache.
        is_free = self.cache.user is None
        self.captured.enable(capture, trees, self.cache if is_free else self.allocate())
        if is_free:
            self.captured.record(self.cache)

    def _arrange(self, stock: StockBackend) -> None:
        """Compute passes by captured steps, or else in compiled code, or else by ``stock``."""
        self._use([backend for backend in (self.captured, self.compiled) if backend], stock)

    def compile(self, *, proved: bool = False) -> bool:
        """Compute passes in compiled code if it supports the model with the same results; return whether it does.

        With ``proved``, results aren't compared, because they have been compared before.
        """
        from hdtool.runtime.engines.cpu.compile_and_check import compile_cpu

        with self.changing(), self.log.unchanged():
            self.use_compiled(compile_cpu(self.stock, self.facts, proved=proved))
        return self.compiled is not None

    def twin(self) -> Target | None:
        """Return another target of the model, with a cache of its own, without checking the model again.

        Return None if the model has changed since the last prompt or needs a check, as on GPUs, with recurrent layers
        and for chains.
        """
        is_simple = self.device.type == "cpu" and not self.facts.recurrent and self.takes_trees
        if not is_simple or not self._changes.is_unchanged:
            return None
        twin = Target(self.model, facts=self.facts)
        if self.compiled and twin.compile(proved=True) and self.compiled.activations_are_int8:
            assert twin.compiled
            twin.compiled.use_int8_activations(self.compiled)
        return twin

    def use_compiled(self, compiled: CompiledModel | None) -> None:
        """Use these compiled passes from now on, or none."""
        self.compiled = compiled
        self._arrange(self.stock_passes)

    @property
    def is_fused(self) -> bool:
        """True if hdtool's own pass is captured rather than a pass through transformers' layers."""
        return self.captured is not None and self.captured.is_fused

    @property
    def takes_trees(self) -> bool:
        """True if the model can verify trees; otherwise it verifies only chains, with caches of ``transformers``."""
        return self.facts.no_trees is None

    @property
    def changes(self) -> int:
        """Number of changes to the model so far (adapters, weights, hooks); each invalidates all cached contexts."""
        return self._changes.count

    @torch.inference_mode()
    def notice_silent_change(self, *, goes_on: bool) -> bool:
        """Return True if weights changed unnoticed by torch; count the change, which invalidates all cached contexts.

        Writing to a weight through ``.data`` leaves its version counter unchanged. The logits after a single token are
        therefore compared with those that an earlier call recorded. The first call returns False, and later ones
        compare only if ``goes_on`` says that a prompt continues a cached context, and otherwise return False.

        Comparing the cached keys and values of such a context is not enough, since recurrent states can't be compared.
        Return False if several processes share the model.
        """
        if self.processes > 1 or (self._first_logits is not None and not goes_on):
            return False
        with self.log.unchanged():
            logits = self.stock_passes.prefill(some_context(1, self.config.vocab_size), self.allocate(1, 1).slots[0])
        before, self._first_logits = self._first_logits, logits.clone()
        if before is None or bool((distances(logits, before) <= tolerance_of(self.dtype)).all()):
            return False
        self._changes.count += 1
        return True

    def changing(self) -> AbstractContextManager[None]:
        """Return a context manager that ignores changes to the model, for those by hdtool that don't affect answers."""
        return self._changes.ignored()

    def notice_changes(self) -> None:
        """Discard captured and compiled passes if the model changed since the last prompt; count the change.

        Passes stay valid if weights were only written in place. If the model's modules, code or hooks changed, check it
        again; raise a ``ModelError`` if the check fails.
        """
        with forward_lock(self.model):  # a pass of another target may have replaced forwards, and a proof adds hooks
            changed = self._changes.found(self._discard)
            if changed:
                self._changes.record(holds_memory=self.captures)
        for backend in self._backends:
            backend.check(again=changed)

    def _discard(self, is_other_code: bool) -> None:
        self._first_logits = None
        for backend in self._backends:
            backend.renew()
        # With several processes, all of them would have to run the check at the same time.
        if (is_other_code or self.vocabulary != embedded_tokens(self.model)) and self.processes == 1:
            self.vocabulary = embedded_tokens(self.model.eval())
            with self.changing(), self.log.unchanged():
                self._prove(self.facts)

    def ranking_passes(self, rankings: int, best: int) -> RankingPasses:
        """Return an object that runs the passes of a trained drafter, captured if steps are; see ``RankingPasses``."""
        from hdtool.runtime.engines.captured.ranking_passes import RankingPasses

        capture = self._capture(self.device) if self.captures else None
        return RankingPasses(capture, self.device, rankings, best, lambda: self.changes)

    def drafter_layers(self, parts: ModelParts[Module], windows: list[AttentionWindow]) -> DrafterLayers:
        """Return an object that computes a trained drafter's decoder layers by the reference operations."""
        from hdtool.runtime.engines.reference.drafter_layers import DrafterLayers

        return DrafterLayers(parts, windows)

    @property
    def program_support(self) -> EngineSupport[Module]:
        """The modules and families that ``ProgramPass`` supports for weights of the model's dtype and device."""
        from hdtool.runtime.engines.reference.program_support import program_support

        return program_support(self.dtype, self.device)

    def context_limit(self, prompt_length: int) -> int | None:
        return context_limit(self.config, prompt_length)

    def reads_in_pieces(self, length: int) -> bool:
        """Return True if a prompt of ``length`` tokens may be read in several passes.

        It may not if a token's result depends on how the passes split the prompt: with 8-bit layers of bitsandbytes, in
        a LongRoPE model beyond its original context length, and if passes don't continue correctly from earlier ones.
        """
        is_fixed = not self.stock.row_by_row.layers and self.context_limit(length) == self.context_limit(1)
        return is_fixed and self.facts.continues

    @property
    def cache(self) -> Cache:
        """Cache for answers that are decoded one after another; it keeps the context of the last answer."""
        if self._own_cache is None:
            self._own_cache = self.allocate()
        return self._own_cache

    def prepare(self, cache: Cache) -> None:
        """Capture the steps over the slots of a cache, if steps are captured, so that no answer waits for that."""
        if self.captured:
            self.captured.record(cache)

    def watch_hidden(self, layers: Sequence[int] = ()) -> slice:
        """From now on, make each pass return hidden states, which some drafters need; return a slice of columns.

        The slice selects the columns with the output layer's input or, if ``layers`` are given, those with the outputs
        of these decoder layers. Contexts cached before cannot be continued. Raise a ``FamilyError`` if a layer doesn't
        exist, or if no module returns the output layer's input.
        """
        if (known := self.hidden.columns(layers)) is not None:
            return known
        engine = BackendEngine([], self.stock_passes, self.log)

        def run() -> None:
            engine.prefill(engine.allocate(1, MIN_GROWTH), 0, some_context(4, self.config.vocab_size))

        self.notice_changes()
        with self.changing():
            if not self.hidden.is_watched:
                self.hidden.watch(self.model, self.model.config.model_type, run)
            if layers:
                self.hidden.watch_layers(self.model.get_decoder(), layers)
            run()
        for backend in self._backends:
            backend.watch_hidden(self.hidden.layers)
        self._changes.count += 1  # slots that were filled before have no hidden states
        if self.captured and self.captures:
            if self.cache.user is None:
                self.cache.slots[0].cut(0)
                self.captured.record(self.cache)
            self._changes.record(holds_memory=True)
        columns = self.hidden.columns(layers)
        assert columns is not None
        return columns

    def note_overflow(self) -> None:
        """Print, at most once, a note that logits were NaN or infinite."""
        if not self._overflow_noted:
            self._overflow_noted = True
            note(
                f"the model overflowed in {str(self.dtype).removeprefix('torch.')}: logits were NaN or infinite. "
                "Steps with such logits are decoded without drafts; another --dtype may avoid it"
            )
