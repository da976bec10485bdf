"""The target: a stock ``transformers`` model behind three verbs, prefill, verify and keep."""

from __future__ import annotations

import inspect
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch
from transformers.cache_utils import Cache, DynamicCache

from hdtool.data.errors import FamilyError, HdtoolError, ModelError, reason_of
from hdtool.runtime.model.attention_masks import Mask, MaskBuffer, tree_mask, windows_of
from hdtool.runtime.model.cuda_graphs import Capture, CaptureMaker, by_device
from hdtool.runtime.model.families import (
    context_limit,
    refuse_by_class,
    refuse_by_configuration,
    refuse_by_logits,
    strays,
)
from hdtool.runtime.model.hidden_states import hidden_in, module_of_hidden
from hdtool.runtime.model.kv_cache import LayerShape, Memory, StaticKVCache, layer_shapes
from hdtool.runtime.model.llm_int8 import RowByRow
from hdtool.runtime.model.placement import device_of, scattered
from hdtool.runtime.model.quantized_layers import quantised_layers, refuse_dependent_rows, rounding_told
from hdtool.runtime.model.static_steps import StaticSteps
from hdtool.runtime.tree import LARGEST_TREE, DraftTree

if TYPE_CHECKING:
    from transformers import PreTrainedModel

USABLE_ATTENTION = ("sdpa", "eager")


class Target:
    """The model that has the last word.

    The root of a tree, the last emitted token, is read together with the tree: its logits come
    first, those of the nodes follow in their order.
    """

    def __init__(self, model: PreTrainedModel, capture: CaptureMaker = by_device) -> None:
        """``capture`` says how steps are recorded, where they have fixed shapes at all."""
        refuse_by_configuration(model.config)
        refuse_by_class(model)
        use_masked_attention(model)
        self.model = model.eval()
        self.config = model.config.get_text_config(decoder=True)
        self.device = device_of(model)
        self.dtype: torch.dtype = model.dtype
        self.seconds_in_model = 0.0
        """Time spent inside the model's own forward pass since this target exists."""
        self.passes = 0
        """Forward passes that it was spent in."""
        self._busy = threading.Lock()
        self._conversation: object = None
        """The one whose keys and values are in the cache."""
        self._capture = capture
        self.processes = 1
        """That share its weights."""
        self.vocabulary = embedded_tokens(model)
        """Token ids from here on have no embedding."""
        self._shapes: list[LayerShape] = []
        self._rows = self.rows(0)
        self._overflow_noted = False
        self.windows = windows_of(self.config)
        self._sheet = MaskBuffer()
        self._prefill_options = {"logits_to_keep": 1} if _keeps_logits(model) else {}
        self._pending = 0
        self._steps: StaticSteps | None = None
        self.hidden: torch.Tensor | None = None
        """What the output layer read in the last pass, ``[tokens, width]``; kept once it is watched."""
        self.all_hidden = torch.empty(0)
        """The same of every conversation in the pass, ``[batch, tokens, width]``."""
        self._watched = False
        self._row_by_row = RowByRow(model)
        weakref.finalize(self, self._row_by_row.release)  # the model may outlive its target
        self._rounding: float | None = None
        """How far the logits of a quantised model lie apart by rounding alone, in standard deviations."""
        self._prove_trees()
        if recorder := capture(self.device):
            self._fix_shapes(recorder)
        self.seconds_in_model, self.passes = 0.0, 0

    @property
    def length(self) -> int:
        """Tokens of the context that the model has read and that are accepted."""
        return self._rows.length

    @property
    def captures(self) -> bool:
        """Whether steps have fixed shapes and are recorded."""
        return self._steps is not None

    def new_recorder(self) -> Capture | None:
        """For passes of others beside those of the model, if its own are recorded."""
        return self._capture(self.device) if self._steps else None

    def context_limit(self, prompt_length: int) -> int | None:
        return context_limit(self.config, prompt_length)

    @contextmanager
    def held_by(self, conversation: object, *, begins: bool) -> Iterator[None]:
        """Take the model for one step of a conversation, which no other one may have replaced since it began."""
        if not self._busy.acquire(blocking=False):
            raise ModelError("two threads use one model at once: let them take turns, or load the model for each")
        try:
            if begins:
                self._conversation = conversation
            elif self._conversation is not conversation:
                raise ModelError(
                    "another conversation began on this model before this one ended: finish one before the next, "
                    "answer both by decode_batch, or load the model for each"
                )
            yield
        finally:
            self._busy.release()

    @torch.inference_mode()
    def prefill(self, context: Sequence[int], room: int = 0) -> torch.Tensor:
        """Read a whole context and return the logits ``[1, vocabulary]`` that follow it.

        ``room`` says how many more tokens the conversation may grow to.
        """
        needed = rows_needed(context, room)
        if self._rows.capacity < needed:
            if self._steps:
                needed = self._steps.capacity_for(needed, self.context_limit(len(context)))
            self._rows = self.rows(needed)
        self._pending = len(context)
        if self._steps:
            self._rows.clear_from(len(context))  # steps of fixed shape read past the context
        return self.read(context, self._rows)

    @torch.inference_mode()
    def recompute(self, root: int) -> torch.Tensor:
        """Verify the root alone, after a pass with drafts that overflowed; nothing of that pass is read."""
        if self._steps:
            self._steps.settle(self._rows)
        self._rows.clear_from(self.length)
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

    @torch.inference_mode()
    def verify(self, tree: DraftTree) -> torch.Tensor:
        """Check all drafts in one pass: logits ``[1 + nodes, vocabulary]`` after the root and each node.

        They stand until the next tree is checked.
        """
        self._pending = 1
        if self._steps:
            try:
                step = self._steps.prepared(tree, self._rows)
            except Exception as error:  # whatever foreign model code does that cannot be recorded
                self._free_shapes(reason_of(error))
            else:
                logits = self._counted(step)
                if self._watched:
                    self.hidden = self._steps.hidden(len(tree) + 1)
                return logits
        mask = tree_mask(tree, self.length, self.windows, self.dtype, self.device, self._sheet)
        return self.forward([tree.all_tokens], [(self.length + tree.depths).tolist()], mask, self._rows)[0]

    @torch.inference_mode()
    def commit(self, path: Sequence[int]) -> None:
        """Make the root and the nodes of ``path`` part of the context, forget the rest of the tree."""
        if self._steps:
            self._steps.commit(self._rows, self._pending, path)
        else:
            self._rows.commit(self._pending, path)

    def watch_hidden(self) -> None:
        """Keep the hidden states of each pass from now on, for those who draft from them."""
        if self._watched:
            return

        def run() -> None:
            self.prefill(some_context(4, self.config.vocab_size))

        giver = module_of_hidden(self.model, self.model.config.model_type, run)
        mine = weakref.ref(self)  # the model may outlive its target

        def commit(module: torch.nn.Module, given: object, returned: object) -> None:
            if (target := mine()) and (found := hidden_in(returned)) is not None:
                target.all_hidden, target.hidden = found, found[0]

        giver.register_forward_hook(commit)
        self._watched = True
        run()
        if self._steps:
            self._steps.watch(lambda: self.all_hidden[0])

    def select_slot(self, seat: int) -> None:
        """Of several conversations in one pass, mean this one by ``hidden``."""
        if self._watched:
            self.hidden = self.all_hidden[seat]

    def rows(self, capacity: int) -> StaticKVCache:
        """Memory for a conversation of this model."""
        return StaticKVCache(self.memory(capacity))

    def memory(self, capacity: int, batch: int = 1) -> Memory:
        return Memory.for_layers(self._shapes, capacity, batch)

    @torch.inference_mode()
    def read(self, context: Sequence[int], rows: StaticKVCache) -> torch.Tensor:
        """Read a whole context into ``rows`` and return the logits ``[1, vocabulary]`` that follow it."""
        rows.length = 0
        # No mask: the model makes its own, or better, leaves it to a causal kernel.
        return self.forward([list(context)], [range(len(context))], None, rows, **self._prefill_options)[0, -1:]

    def forward(
        self, tokens: list[list[int]], positions: Sequence[Sequence[int]], mask: Mask, rows: Cache, **options: int
    ) -> torch.Tensor:
        """One pass of the model: logits ``[batch, tokens, vocabulary]``."""
        ids = torch.tensor(tokens, device=self.device)
        places = torch.tensor(positions, device=self.device)

        def step() -> torch.Tensor:
            with self._row_by_row.on() if mask is not None else nullcontext():
                logits: torch.Tensor = self.model(
                    input_ids=ids,
                    position_ids=places,
                    attention_mask=mask,
                    past_key_values=rows,
                    use_cache=True,
                    return_dict=True,
                    **options,
                ).logits
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            return logits

        return self._counted(step)

    def _counted(self, step: Callable[[], torch.Tensor]) -> torch.Tensor:
        started = time.perf_counter()
        logits = step()
        self.seconds_in_model += time.perf_counter() - started
        self.passes += 1
        return logits

    @torch.inference_mode()
    def _prove_trees(self) -> None:
        """Check on a small tree that this model, whatever its family, can do what the loop relies on.

        The plain pass that the tree is compared with also tells the shapes of the cache.
        """
        context, tree, paths = _small_tree(self.config.vocab_size)
        used = DynamicCache(config=self.config)
        whole = torch.tensor([[*context, *path] for path in paths], device=self.device)
        try:
            plain = self.model(input_ids=whole, past_key_values=used, use_cache=True).logits
            self._shapes = layer_shapes(used)
            if quantised_layers(self.model):
                with self._row_by_row.on():
                    refuse_dependent_rows(self.model, self.device)
                    self._rounding = rounding_told(self.model, whole, plain)
            self._rows = self.rows(len(context) + len(tree) + 1)
            self.prefill(context[:-1])
            self.commit([])
            of_tree = self.verify(tree)
        except (HdtoolError, torch.OutOfMemoryError, KeyboardInterrupt):
            raise
        except Exception as error:  # whatever foreign model code trips over
            kind, reason = self.model.config.model_type, reason_of(error)
            raise FamilyError(
                f"models of type {kind!r} cannot be used: checking a small tree failed ({reason})"
            ) from error
        depth = len(paths[0])
        last_of_path = of_tree.view(-1, of_tree.shape[-1])[depth::depth]
        refuse_by_logits(self.model.config.model_type, last_of_path, plain[:, -1], self._rounding)

    @torch.inference_mode()
    def _fix_shapes(self, capture: Capture) -> None:
        """Take steps of fixed shape from now on, if they can be recorded and say what the others say."""
        if reason := scattered(self.model) or self._row_by_row.reason:
            return self._free_shapes(reason)
        expected = self._two_steps()
        like = expected[0]
        self._steps = StaticSteps(self.model, self.windows, like.shape[-1], like.dtype, capture)
        for found, usual in zip(self._two_steps(), expected, strict=True):
            if self._steps and (distance := strays(found, usual, self._rounding)):
                self._free_shapes(f"its logits would be off by {distance}")

    def _two_steps(self) -> list[torch.Tensor]:
        """Logits of a tree and of another one, behind a path of the first that had to be moved."""
        context, tree, _ = _small_tree(self.config.vocab_size)
        self.prefill(context[:-1])
        self.commit([])
        first = self.verify(tree).clone()
        self.commit([3, 4, 5])
        return [first, self.verify(tree).clone()]

    def _free_shapes(self, reason: str) -> None:
        print(f"note: the steps of this model are not captured as CUDA graphs: {reason}", file=sys.stderr)
        if self._steps:
            self._steps.settle(self._rows)
            self._steps = None


def use_masked_attention(model: PreTrainedModel) -> None:
    """Let the model compute attention in a way that takes masks of ours, as flash attention does not."""
    if model.config._attn_implementation not in USABLE_ATTENTION:
        model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")


def rows_needed(context: Sequence[int], room: int) -> int:
    """By a conversation that may grow by ``room`` tokens, the largest tree behind it included."""
    return len(context) + room + LARGEST_TREE + 1


def embedded_tokens(model: PreTrainedModel) -> int:
    """How many token ids the model can read; a tokenizer may have more."""
    rows = getattr(model.get_input_embeddings(), "num_embeddings", None)
    return int(rows or model.config.get_text_config(decoder=True).vocab_size)


def _keeps_logits(model: PreTrainedModel) -> bool:
    return "logits_to_keep" in inspect.signature(model.forward).parameters


def some_context(length: int, vocabulary: int) -> list[int]:
    """Tokens for a model to read where it does not matter which."""
    return [(7 * place + 3) % vocabulary for place in range(length)]


def _small_tree(vocabulary: int) -> tuple[list[int], DraftTree, list[list[int]]]:
    """A context and five paths of three tokens below it; wrong masks or positions spoil four of them."""
    context = some_context(4, vocabulary)
    paths = [[(31 * path + 11 * depth + 5) % vocabulary for depth in range(3)] for path in range(5)]
    tokens = [token for path in paths for token in path]
    parents = [node - 1 if node % 3 else -1 for node in range(len(tokens))]
    return context, DraftTree.of(context[-1], tokens, parents), paths
