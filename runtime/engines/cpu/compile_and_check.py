"""Compiles a model, and checks that results of the compiled code match those of Transformers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, cast

import numpy as np
import torch
from torch.nn import ModuleList

from hdtool.data.progress import with_progress
from hdtool.runtime.caches.kv_cache import KVTensors
from hdtool.runtime.caches.transformers_views import SlotKVCache
from hdtool.runtime.core.tree import DraftTree
from hdtool.runtime.engines.backend import BackendEngine
from hdtool.runtime.engines.cpu.compiled_model import CompiledModel
from hdtool.runtime.engines.cpu.compiled_support import (
    ACTIVATIONS,
    COMPILED,
    CompiledParts,
    has_compiled_experts,
)
from hdtool.runtime.engines.cpu.convolution import ORIGIN, fill_origins
from hdtool.runtime.engines.cpu.layer_kernel import compile_layers, compute_layers, layers_scratch_size
from hdtool.runtime.engines.cpu.layer_record import compute_layer_inputs
from hdtool.runtime.engines.cpu.mixer_kernel import accept
from hdtool.runtime.engines.cpu.mixer_table import MixerTable
from hdtool.runtime.engines.cpu.pass_kernel import compile_passes
from hdtool.runtime.engines.cpu.weight_table import WeightTable
from hdtool.runtime.engines.proofs.probes import PROOF_CONTEXT, PROOF_TREE, logits_of, some_context
from hdtool.runtime.engines.stock.model_facts import ModelFacts
from hdtool.runtime.engines.stock.stock_model import StockModel, embedded_tokens
from hdtool.runtime.engines.stock.tree_passes import TreePasses
from hdtool.runtime.kernels.code_folder import mark_compiled
from hdtool.runtime.kernels.compile_process import PASSES, wait_until_compiled
from hdtool.runtime.kernels.thread_pool import shared_thread_pool
from hdtool.runtime.kernels.vector_code import LANES
from hdtool.runtime.model.pass_inputs import FULL, AttentionMask, AttentionMasks, AttentionWindow, sent_step
from hdtool.runtime.model.transformers_internals import cache_argument
from hdtool.runtime.program.embedding_and_head import (
    norms_and_activations_match,
    position_kinds,
    rotary_kinds,
    rotary_of,
    windows_of_layers,
)
from hdtool.runtime.program.llama_like_families import LLAMA
from hdtool.runtime.program.model_parts import fits_cache, model_parts

TOLERANCE = 1e-4
"""Maximum relative difference between a row that compiled code computes and the row that Transformers computes.

The difference of a layer's output row is relative to what the layer adds to the hidden states. Float32 rounding causes
a difference of about 1e-6.
"""
CONTEXT_LENGTHS = (0, 37, 150)
"""Context lengths at which some layers are compared: with a tree for the second length, a bare root for the others."""
BATCH_LENGTHS, BATCH_NODES = (5, 20), (2, 4)
"""Context lengths and sizes of two chains that are compared in one pass."""
Case = tuple[KVTensors, SlotKVCache, torch.Tensor, AttentionMask, torch.Tensor | None, Sequence[DraftTree]]
"""``(storage, cache, positions, masks, mask, trees)`` of a compared pass.

``masks`` are Transformers' masks. ``mask`` is the compiled code's, which ignores attention windows. ``trees`` is empty
for a prompt.
"""
Rotation = tuple[torch.Tensor, torch.Tensor]


@torch.inference_mode()
def compile_cpu(stock: StockModel, facts: ModelFacts, *, proved: bool = False) -> CompiledModel | None:
    """Compile a model's passes; return None if the model is unsupported or the results differ from Transformers'.

    With ``proved``, the results aren't compared with Transformers', because they have been compared before.
    """
    if stock.device.type != "cpu" or stock.dtype != torch.float32 or facts.no_trees:
        return None
    parts, windows = model_parts(stock.model, COMPILED), windows_of_layers(stock.config, stock.windows)
    if parts is None or windows is None or not _is_compiled(parts):
        return None
    trees = TreePasses(stock, facts)
    if not fits_cache(parts, facts.shapes) or not _fit_states(parts, trees.allocate(1, 1).storage, facts):
        return None
    if parts.family is not LLAMA and not norms_and_activations_match(parts, stock.device):
        return None
    wait_until_compiled(PASSES)
    compile_layers()
    compile_passes()
    mark_compiled(PASSES)
    compiled = CompiledModel(parts, windows, stock.log)
    matches = proved or (
        _LayerProof(stock, facts, compiled.table, parts, windows).holds()
        and _has_same_inputs(stock, compiled, parts)
        and _has_same_logits(stock, trees, compiled, parts)
    )
    return compiled if matches else None


def _is_compiled(parts: CompiledParts) -> bool:
    """Return True if compiled code supports all activations, experts, rotary widths, factors and per-layer inputs."""
    kinds = [kind for kind in dict.fromkeys(rotary_kinds(parts)) if kind is not None]
    none, first = torch.empty(0, dtype=torch.float32), torch.zeros(1, 1, dtype=torch.int64)
    rotary_widths = [rotary_of(parts, none, first, kind).cos.shape[1] for kind in kinds]
    activations = {layer.activation for layer in parts.layers if layer.down}
    return (
        len(activations) < 2
        and activations <= ACTIVATIONS[parts.family.gates_mlp]
        and all(has_compiled_experts(layer, parts.family) for layer in parts.layers)
        and all(width % LANES == 0 for width in rotary_widths)
        and all(layer.factor is None or layer.factor.dtype == torch.float32 for layer in parts.layers)
        and (parts.inputs is None or len(parts.inputs.norm.weight) % LANES == 0)
    )


def _fit_states(parts: CompiledParts, storage: KVTensors, facts: ModelFacts) -> bool:
    """Return True if the cache holds all mixers' states, and stock passes compute all mixers in closed form.

    Stock passes must also read prompts in parts correctly, apart from bounds on time steps. Without mixers and states,
    return True.
    """
    states, mixers, recurrent = storage.states, MixerTable.of(parts), facts.recurrent
    if states is None or mixers is None or recurrent is None:
        return states is None and mixers is None
    continues = facts.continues or recurrent.bounds_prompts
    return continues and recurrent.can_be_captured and mixers.fits(states)


class _LayerProof:
    """Compares compiled layers with Transformers' layers, on hidden states of the model."""

    def __init__(
        self,
        stock: StockModel,
        facts: ModelFacts,
        table: WeightTable,
        parts: CompiledParts,
        windows: Sequence[AttentionWindow],
    ) -> None:
        self._stock, self._recurrent, self._table, self._parts = stock, facts.recurrent, table, parts
        self._trees = TreePasses(stock, facts)
        self._windows = [window.kind for window in windows]
        self._masks = AttentionMasks([AttentionWindow(FULL)], stock.dtype, stock.device)
        self._random = torch.Generator().manual_seed(0)
        self._embedded = torch.empty(0)
        """Embeddings of the current pass's rows."""
        self._inputs = torch.empty(0)
        """Per-layer inputs of the current pass, ``[sequences, rows, layers, width]``."""
        self._shared: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        """Keys and values that Transformers' layers share in the current pass, by layer type."""
        self._compared: list[int] = []
        """Layers compared so far in the current pass."""
        tokens = torch.tensor([some_context(len(PROOF_TREE) + 1, embedded_tokens(stock.model))])
        embedded: torch.Tensor = stock.model.get_input_embeddings()(tokens)
        self._states = [embedded]
        """Input of each layer so far: the embeddings, then Transformers' output of the previous layer."""

    def holds(self) -> bool:
        """Return True if all compiled layers match Transformers' layers on a tree, and some of them on other inputs.

        The first layer, the last layer, the first with attention and the first with a mixer are also compared on other
        context lengths and a batch, and all layers with mixers on a prompt.
        """
        layers = self._parts.layers
        mixing = [number for number, layer in enumerate(layers) if layer.mixer]
        ends = {0, len(layers) - 1, *map(layers.index, self._parts.attending[:1]), *mixing[:1]}
        return (
            self._is_same(
                with_progress(range(len(layers)), "layers checked", is_left=False), self._case([PROOF_TREE], [7])
            )
            and all(self._is_same(sorted(ends), case) for case in self._cases())
            and (not mixing or self._is_same(mixing, self._prompt()))
        )

    def _prompt(self) -> Case:
        """Return a test case: a prompt that continues a context; passes over it advance the recurrent states."""
        length, rows = CONTEXT_LENGTHS[1], PROOF_CONTEXT
        storage = self._trees.allocate(1, length + rows).storage
        masks, unwindowed = (each.continuation_mask(rows, length) for each in (self._stock.masks, self._masks))
        positions = length + torch.arange(rows)[None]
        return storage, SlotKVCache(storage, [length]), positions, masks, cast(Any, unwindowed), ()

    def _cases(self) -> Iterator[Case]:
        for length in CONTEXT_LENGTHS:
            yield self._case([PROOF_TREE if length == CONTEXT_LENGTHS[1] else DraftTree.bare(0)], [length])
        chains = [DraftTree.of(0, [0] * nodes, range(-1, nodes - 1)) for nodes in BATCH_NODES]
        yield self._case(chains, BATCH_LENGTHS)

    def _case(self, trees: Sequence[DraftTree], lengths: Sequence[int]) -> Case:
        rows = max(map(len, trees)) + 1
        storage = self._trees.allocate(len(trees), max(lengths) + rows).storage
        positions = sent_step(trees, lengths, self._stock.device).positions
        masks, unwindowed = (each.of_trees(trees, lengths) for each in (self._stock.masks, self._masks))
        return storage, SlotKVCache(storage, lengths), positions, masks, cast(Any, unwindowed), trees

    def _is_same(self, numbers: Iterable[int], case: Case) -> bool:
        storage, _, positions, *_ = case
        for tensor in (*storage.tensors, *(storage.states.stacks.values() if storage.states else ())):
            tensor.normal_(generator=self._random)
        input_parts = self._parts.layers[0].inputs
        width = input_parts.width if input_parts else 0
        self._inputs = torch.randn(*positions.shape, len(self._windows), width, generator=self._random)
        self._shared, self._compared = {}, []
        for number in numbers:
            rows = self._states[number].flatten(0, 1)
            chosen = torch.arange(positions.numel()) % len(rows)
            hidden = rows[chosen].view(*positions.shape, -1)
            self._embedded = self._states[0].flatten(0, 1)[chosen].view_as(hidden)
            expected = self._expected(number, hidden, case)
            if expected is None:
                return False
            self._compared.append(number)
            if number + 1 == len(self._states):
                self._states.append(expected)
        return True

    def _expected(self, number: int, hidden: torch.Tensor, case: Case) -> torch.Tensor | None:
        """Return the output of Transformers' layer, or None if the compiled layer's output, cache or states differ."""
        storage, cache, positions, masks, _, trees = case
        part = self._parts.layers[number]
        mask = masks[self._windows[number]] if isinstance(masks, dict) and part.attention else masks
        mask = mask if part.attention else None
        kind = filter(None, [position_kinds(self._parts)[number]])
        rotary: Rotation | None = self._parts.rotary(hidden, positions, *kind) if self._parts.rotary else None
        states_before = list(storage.states.by_layer[number].values()) if part.mixer and storage.states else []
        cached = [*states_before, *(tensor for tensor in storage.layers[number] if tensor.numel())]
        before = [tensor.clone() for tensor in cached]
        arguments = {
            "attention_mask": mask,
            "position_embeddings": rotary,
            "position_ids": positions,
            "use_cache": True,
        }
        arguments |= self._other_inputs(number, case, mask)
        recurrent = self._recurrent if part.mixer and trees else None
        over = recurrent.over(trees, storage.states, cache) if recurrent and storage.states else nullcontext()
        with over as states:
            output = part.layer(hidden.clone(), **arguments, **cache_argument(part.layer, cache))
        expected = output[0] if isinstance(output, tuple) else output
        if not isinstance(expected, torch.Tensor) or expected.shape != hidden.shape:
            return None
        if states and storage.states:
            for slot, tree in enumerate(trees):
                states.commit(slot, _path_of(tree), storage.states.part(slot, 1))
        written = [tensor.clone() for tensor in cached]
        for tensor, old in zip(cached, before, strict=True):
            tensor.copy_(old)
        actual = self._compiled(number, hidden, case)
        is_padding = torch.tensor([[row > len(tree) for row in range(hidden.shape[1])] for tree in trees])
        if part.mixer and is_padding.any():
            actual[is_padding] = expected[is_padding]
        distances = [distance(actual, expected, expected - hidden)]
        for place, (tensor, new) in enumerate(zip(cached, written, strict=True)):
            # A row of a state may be tiny compared with the rows it is summed with, so a state is compared as one row.
            is_state = place < len(states_before)
            ours, theirs = (each.flatten(-2) if is_state else each for each in (tensor, new))
            distances.append(distance(ours, theirs, theirs))
        return expected if all(gap <= TOLERANCE for gap in distances) else None

    def _other_inputs(self, number: int, case: Case, mask: AttentionMask) -> dict[str, Any]:
        """Return a layer's keyword arguments for its per-layer input, other layers' keys and values, and embeddings."""
        storage, cache, positions, *_ = case
        part, arguments = self._parts.layers[number], dict[str, Any]()
        if part.inputs:
            arguments["per_layer_input"] = self._inputs[:, :, number]
        if self._parts.family.side:
            embeddings = {"original_hidden_states": self._embedded, "layer_idx": number}
            arguments |= {**embeddings, "attention_mask": None, "causal_mask": mask}
        if self._parts.family.attention.shared_kv_attribute:
            arguments["shared_kv_states"] = self._shared
        if part.kv_source is not None and part.kv_source not in self._compared:
            slots, new = positions.shape
            end = cache.length + new
            keys, values = (view[:slots, :, :end] for view in storage.layers[part.kv_source])
            self._shared[cast(Any, part.attention).layer_type] = keys, values
        return arguments

    def _compiled(self, number: int, hidden: torch.Tensor, case: Case) -> torch.Tensor:
        """Return a compiled layer's output; write to the KV cache and advance the states along each tree's path."""
        storage, cache, positions, _, mask, trees = case
        slots, new = positions.shape
        pass_record, offsets = self._table.pass_record(slots, new, mask), np.arange(slots + 1) * new
        row_positions = positions.expand(slots, -1).contiguous()
        tables = self._table.rotary_at(row_positions)
        pass_record.row_positions, pass_record.rotary_tables = row_positions.data_ptr(), tables.data_ptr()
        pass_record.inputs = self._inputs.data_ptr()
        lengths = np.array(cache.lengths, np.int64)
        pass_record.row_offsets, pass_record.starts = offsets.ctypes.data, lengths.ctypes.data
        hidden = hidden.clone(memory_format=torch.contiguous_format)
        pass_record.embedded = self._embedded.data_ptr()
        layer, mixers = self._table.with_cache(storage)[number : number + 1], self._table.mixers
        scratch = torch.empty(layers_scratch_size(pass_record, layer, cache.length + new), dtype=torch.float32)
        origins = np.zeros((slots, new), ORIGIN)
        for table, tree in zip(origins, trees or [DraftTree.of(0, [0] * (new - 1), range(-1, new - 2))], strict=True):
            fill_origins(table, tree.parents)
        journal = torch.empty(slots * new * mixers.journal_size if mixers else 0, dtype=torch.float32)
        pass_record.origins, pass_record.journal = origins.ctypes.data, journal.data_ptr()
        pass_record.advances = not trees
        with shared_thread_pool(torch.get_num_threads()).open() as pass_record.thread_pool:
            compute_layers(pass_record, layer, hidden.data_ptr(), scratch.data_ptr())
            for slot, tree in enumerate(trees):
                rows = _path_of(tree)
                path = np.array([slot, len(rows), len(rows), *rows], np.int64)
                accept(pass_record, layer, path, scratch.data_ptr())
        return hidden


def _path_of(tree: DraftTree) -> list[int]:
    """Return the rows from the root to the last node at depth 2 or more, or to the last node if none is that deep."""
    rows, node = list[int](), int(max(range(-1, len(tree)), key=lambda node_: (tree.depths[node_ + 1] > 1, node_)))
    while node >= 0:
        rows.insert(0, node + 1)
        node = int(tree.parents[node])
    return [0, *rows]


def distance(actual: torch.Tensor, expected: torch.Tensor, scale: torch.Tensor) -> float:
    """Return the maximum over rows of ``norm(actual - expected) / norm(scale)``."""
    lengths = torch.linalg.vector_norm(scale, dim=-1).clamp_min(1e-12)
    return float((torch.linalg.vector_norm(actual - expected, dim=-1) / lengths).max())


def _has_same_inputs(stock: StockModel, compiled: CompiledModel, parts: CompiledParts) -> bool:
    """Return True if the compiled per-layer inputs match Transformers', or if the model has no such inputs."""
    if parts.inputs is None:
        return True
    ids = torch.tensor([some_context(len(PROOF_TREE) + 1, embedded_tokens(stock.model))])
    embedded: torch.Tensor = stock.model.get_input_embeddings()(ids)
    expected = parts.inputs.of(ids, embedded)
    rows, inputs = ids.numel(), compiled.table.outer_record(1).layer_inputs
    pass_record, memory = compiled.table.pass_record(1, rows), torch.empty(rows + 1, expected[0, 0].numel())
    with shared_thread_pool(torch.get_num_threads()).open() as pass_record.thread_pool:
        compute_layer_inputs(pass_record, inputs, ids.data_ptr(), rows, embedded.data_ptr(), memory.data_ptr())
    actual = memory[:rows].view_as(expected)
    return distance(actual, expected, expected) <= TOLERANCE


def _has_same_logits(stock: StockModel, trees: TreePasses, compiled: CompiledModel, parts: CompiledParts) -> bool:
    """Return True if compiled passes give the same logits as Transformers when both compute only the first layer.

    The other layers have been compared on their own.
    """
    vocabulary = embedded_tokens(stock.model)
    with compiled.table.first_layer_alone(), _first_layer_alone(parts):
        expected = _logits_of_passes(BackendEngine([], trees, stock.log), vocabulary)
        compiled.record()  # the model has fewer layers within this block
        actual = _logits_of_passes(BackendEngine([compiled], trees, stock.log), vocabulary)
    compiled.record()
    distances = [distance(*pair, pair[1]) for pair in zip(actual, expected, strict=True)]
    return compiled.passes == len(actual) + 1 and max(distances) <= TOLERANCE


@contextmanager
def _first_layer_alone(parts: CompiledParts) -> Iterator[None]:
    """Remove all but the first layer from Transformers' model within this block."""
    modules: Any = parts.decoder._modules
    layers = modules["layers"]
    modules["layers"] = ModuleList(layers[:1])
    try:
        yield
    finally:
        modules["layers"] = layers


def _logits_of_passes(engine: BackendEngine, vocabulary: int) -> list[torch.Tensor]:
    """Return the logits of a tree, of a root after two of the tree's nodes were accepted, and of a continued prompt."""
    cache, context = engine.allocate(), some_context(PROOF_CONTEXT, vocabulary)
    of_trees = logits_of(engine, context, [(PROOF_TREE, [0, 1]), (DraftTree.bare(1), [])], cache)
    return [*of_trees, engine.prefill(cache, 0, context, cache.slots[0].length).logits.clone()]
