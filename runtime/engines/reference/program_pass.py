"""Computes the pass of a described model over draft trees, from the parts that ``runtime/program`` recognizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch.nn import Module

from hdtool.runtime.engines.capturable_pass import StepOutput
from hdtool.runtime.engines.reference.latent_attention import LatentPlan
from hdtool.runtime.engines.reference.mixers import mix
from hdtool.runtime.engines.reference.operations import HeadLayout, HeadNorms, KeysAndValues, Norm, Operations, Residual
from hdtool.runtime.engines.reference.tree_indices import TreeIndices
from hdtool.runtime.engines.reference.tree_recurrences import MixerStates, StackedStates
from hdtool.runtime.model.hidden_states import HiddenStates
from hdtool.runtime.model.transformers_internals import experts_on_device
from hdtool.runtime.program.added_mixture import MixtureParts
from hdtool.runtime.program.embedding_and_head import EmbeddingAndHead, Rotary, rotary_kinds, rotary_of
from hdtool.runtime.program.latent_parts import LatentParts
from hdtool.runtime.program.llama_like_families import Family
from hdtool.runtime.program.model_parts import LayerParts, ModelParts
from hdtool.runtime.program.side_block import GATE_UP, PROJECTIONS, SideBlock

if TYPE_CHECKING:
    from hdtool.runtime.caches.kv_cache import KVTensors
    from hdtool.runtime.model.pass_inputs import AttentionWindow, StepTensors

NO_STATES: Mapping[int, MixerStates] = {}
Matmul = Callable[[torch.Tensor], torch.Tensor]
Join = Callable[[list[Any]], Matmul]
"""Returns a function that computes several linear layers and joins their outputs."""


def join_outputs(modules: list[Any]) -> Matmul:
    """Return a function that computes linear layers one after another and joins their outputs."""
    if len(modules) == 1:
        return cast(Matmul, modules[0])
    return lambda rows: torch.cat([module(rows) for module in modules], dim=-1)


def scaled(matmul: Matmul, factors: list[float], rows_of: list[int]) -> Matmul:
    """Return a function that computes a matmul and scales its outputs; factor ``i`` scales ``rows_of[i]`` columns."""
    if all(factor == 1.0 for factor in factors):
        return matmul

    def scale(rows: torch.Tensor) -> torch.Tensor:
        outputs = matmul(rows)
        for part, factor in zip(outputs.split(rows_of, dim=-1), factors, strict=True):
            if factor != 1.0:
                part.mul_(factor)
        return outputs

    return scale


def adapted(matmul: Matmul, side: SideBlock[Module] | None, names: Sequence[str]) -> Matmul:
    """Return a function that adds the outputs of the adapters ``names``, if a layer has them, to those of a matmul."""
    adapters = [adapter for name in names if side and (adapter := side.adapters.get(name))]
    if not adapters:
        return matmul
    return lambda rows: matmul(rows) + torch.cat([second(first(rows)) for first, second in adapters], dim=-1)


@dataclass(frozen=True)
class AttentionPlan:
    """The matmuls of one layer's attention, and the settings of the operations between them."""

    parts: LayerParts[Module]
    qkv: Matmul
    out: Matmul
    head_norms: HeadNorms
    layout: HeadLayout
    rotary: str | None
    """Layer type to pass to the rotary module; None without rotary positions."""
    source: int
    """Index of the layer whose cached keys and values are read."""
    gates_heads: bool
    """True if ``qkv`` writes an output gate after each query head."""
    residuals: ClassVar[tuple[Residual, ...]] = ()
    """Empty: between the matmuls, only heads are normalized."""

    def projected(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return queries, keys and values ``[tokens, columns]``, and the heads' output gates, if any."""
        qkv, layout, gates = self.qkv(rows), self.layout, None
        if self.gates_heads:
            queries, keys_and_values = qkv.tensor_split([2 * layout.query_heads * layout.width], dim=1)
            both = queries.view(len(rows), layout.query_heads, 2, layout.width)
            gates = both[:, :, 1].flatten(1)
            qkv = torch.cat([both[:, :, 0].flatten(1), keys_and_values], dim=1)
        if norm := self.parts.value_norm:
            columns = layout.key_heads * layout.width
            values = norm(qkv[:, -columns:].view(len(rows), layout.key_heads, layout.width)).flatten(1)
            repeats_keys = len(self.parts.qkv) == 2  # before norm and rotation, they are also the values
            qkv = torch.cat([qkv if repeats_keys else qkv[:, :-columns], values], dim=1)
        return qkv, gates

    def attended(
        self, operations: Operations, rows: torch.Tensor, rotary: Rotary | None, cached: KeysAndValues
    ) -> torch.Tensor:
        """Return the attention's output for normalized rows, and write their keys and values to the cache."""
        qkv, gates = self.projected(rows)
        written = cached if self.parts.kv_source is None else None
        queries = operations.rotate_and_store(qkv, rotary, self.head_norms, written, self.layout)
        mixed = operations.attention(queries, cached, self.layout)
        return self.out(mixed if gates is None else mixed * gates.sigmoid())


@dataclass(frozen=True)
class SidePlan:
    """A block of attention and an MLP whose output is added to what a layer's mixer reads, not to the hidden states."""

    begin: Residual
    """Norm of the hidden states joined with the embeddings."""
    attention: AttentionPlan | LatentPlan
    between: Residual
    """Norm of the attention's output."""
    feed: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    out: Matmul
    end: Residual
    """Norm of the sum that the mixer reads."""


@dataclass(frozen=True)
class LayerPlan:
    """What a pass computes in one layer, in the order of the fields."""

    parts: LayerParts[Module]
    side: SidePlan | None
    """Block of the layer's attention and MLP beside the mixer; ``attention`` and ``feed`` are then None."""
    attention: AttentionPlan | LatentPlan | None
    mixer_factor: float
    """Scales the mixer's output."""
    middle: Residual
    """Residual after attention and mixer, normalized for the MLP or, if there is none, the next or the output layer."""
    feed: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None
    """Computes MLP and experts from two arguments: the normalized rows, and the hidden states before the norm."""
    is_parallel: bool
    """True if ``feed`` reads the same rows as attention."""
    end: Residual
    """Residual after the MLP, normalized for the next or the output layer unless ``last`` does that."""
    added: Residual
    """How the per-layer input is added to the hidden states."""
    last: Residual | None
    """Norm before the next layer or the output layer, if hidden states change after ``end``."""

    @property
    def attentions(self) -> list[AttentionPlan | LatentPlan]:
        attention = self.side.attention if self.side else self.attention
        return [attention] if attention else []

    @property
    def residuals(self) -> list[Residual]:
        of_side = [self.side.begin, self.side.between, self.side.end] if self.side else []
        of_attention = [residual for plan in self.attentions for residual in plan.residuals]
        return [*of_side, *of_attention, self.middle, self.end, self.added, *([self.last] if self.last else [])]


class ProgramLayers:
    """Computes a model's decoder layers and the norm after them."""

    def __init__(
        self,
        parts: ModelParts[Module],
        windows: list[AttentionWindow],
        operations: Operations,
        join: Join = join_outputs,
    ) -> None:
        self._parts, self._operations, self._join = parts, operations, join
        norm = _norm_of(parts.norm, parts.epsilon, parts.family)
        first = [
            None if layer.side else _norm_of(layer.block_norms[0], layer.epsilon, parts.family)
            for layer in parts.layers
        ]
        kinds = rotary_kinds(parts)
        self._kinds = dict.fromkeys(kinds)
        self._begin = Residual(None, first[0])
        self._layers = [
            self._planned(number, layer, window, kind, after)
            for number, (layer, window, kind, after) in enumerate(
                zip(parts.layers, windows, kinds, [*first[1:], norm], strict=True)
            )
        ]
        residuals = [residual for layer in self._layers for residual in layer.residuals]
        head_norms = [plan.head_norms for layer in self._layers for plan in layer.attentions]
        operations.prepare([self._begin, *residuals], head_norms)

    def _planned(
        self,
        number: int,
        layer: LayerParts[Module],
        window: AttentionWindow,
        rotary: str | None,
        next_norm: Norm | None,
    ) -> LayerPlan:
        family = self._parts.family
        factors = layer.factors(family)
        attention: AttentionPlan | LatentPlan | None = None
        if layer.latent:
            attention = self._latent_plan(number, layer, layer.latent, window, rotary)
        elif layer.attention:
            attention = self._attention_plan(number, layer, window, rotary)
        first, after_attention, before_mlp, after_mlp = (
            _norm_of(norm, layer.epsilon, family) for norm in layer.block_norms
        )
        feed, side = self._feed_of(layer) if layer.feeds else None, None
        if layer.side:
            assert attention and feed
            begin, out = _norm_of(layer.side.norm, layer.epsilon, family), cast(Matmul, layer.side.out)
            between, end = Residual(None, before_mlp), Residual(None, first)
            side = SidePlan(Residual(None, begin), attention, between, feed, out, end)
            attention = feed = None
        multiplier = float(getattr(layer.layer, family.layer.residual)) if family.layer.residual else 1.0
        is_changed = layer.inputs is not None or layer.factor is not None
        return LayerPlan(
            layer,
            side,
            attention,
            factors.get("mixer_out", 1.0),
            Residual(after_attention, before_mlp if feed else next_norm, multiplier),
            feed,
            family.layer.is_parallel,
            Residual(after_mlp, None if is_changed else next_norm, multiplier),
            Residual(_norm_of(layer.inputs.norm if layer.inputs else None, layer.epsilon, family), None),
            Residual(None, next_norm) if is_changed else None,
        )

    def _attention_plan(
        self, number: int, layer: LayerParts[Module], window: AttentionWindow, rotary: str | None
    ) -> AttentionPlan:
        family, attention = self._parts.family, cast(Any, layer.attention)
        described = family.attention
        layout = HeadLayout(
            layer.heads * layer.groups,
            layer.heads,
            layer.width,
            layer.scale,
            window,
            getattr(attention, described.softcap) if described.softcap else None,
            attention.sinks if described.has_sinks else None,
        )
        norms = [Norm.of(norm, layer.epsilon, family.norm) for norm in layer.head_norms]
        factors, modules = layer.factors(family), list[Any](layer.qkv)
        scales = [factors.get(name, 1.0) for name in PROJECTIONS][: len(modules)]
        return AttentionPlan(
            layer,
            scaled(
                adapted(self._join(modules), layer.side, PROJECTIONS),
                scales,
                [module.out_features for module in modules],
            ),
            scaled(cast(Matmul, layer.out), [factors.get("out", 1.0)], [layer.hidden]),
            (norms[0], norms[-1]) if norms else None,
            layout,
            rotary,
            number if layer.kv_source is None else layer.kv_source,
            described.gates_heads,
        )

    def _latent_plan(
        self,
        number: int,
        layer: LayerParts[Module],
        latent: LatentParts[Module],
        window: AttentionWindow,
        rotary: str | None,
    ) -> LatentPlan:
        kind = self._parts.family.norm
        return LatentPlan(
            self._join(list(layer.qkv)),
            latent,
            cast(Matmul, layer.out),
            Residual(None, Norm.of(latent.query_norm, latent.epsilon, kind) if latent.query_norm else None),
            Norm.of(latent.norm, latent.epsilon, kind),
            HeadLayout(latent.heads, 1, latent.rank, layer.scale, window, rotated=latent.rotated),
            rotary,
            number,
        )

    def _feed_of(self, layer: LayerParts[Module]) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        experts, mixture, described = layer.experts, layer.added_mixture, self._parts.family.experts
        dense = self._mlp_of(layer) if layer.down else None
        if experts is not None and described and described.added_block and dense:
            return lambda rows, _: self._mixed(experts, rows) + dense(rows)
        if experts is not None:
            return lambda rows, _: self._mixed(experts, rows)
        assert dense
        return partial(_fed_with_mixture, dense, mixture) if mixture else lambda rows, _: dense(rows)

    def _mlp_of(self, layer: LayerParts[Module]) -> Matmul:
        family, activation = self._parts.family, layer.activation
        factors = layer.factors(family)
        scales = [factors.get("gate", 1.0), 1.0] if family.gates_mlp else [factors.get("gate", 1.0)]
        gate_up = adapted(self._join(list(layer.gate_up)), layer.side, [GATE_UP])
        gate_up = scaled(gate_up, scales, [layer.inner] * len(scales))
        down = scaled(cast(Matmul, layer.down[0]), [factors.get("down", 1.0)], [layer.hidden])
        if not family.gates_mlp:
            activate = cast(Matmul, layer.activation_module)
            return lambda rows: down(activate(gate_up(rows)))
        return lambda rows: down(self._operations.gate(gate_up(rows), activation))

    def _mixed(self, experts: Module, rows: torch.Tensor) -> torch.Tensor:
        """Run Transformers' mixture of experts, and drop the routing weights that some mixtures return as well."""
        outputs = experts(rows.view(self._slots, -1, rows.shape[-1]))
        mixed: torch.Tensor = outputs[0] if isinstance(outputs, tuple) else outputs
        return mixed.view(rows.shape)

    def through(
        self,
        hidden: torch.Tensor,
        normed: torch.Tensor | None,
        positions: torch.Tensor,
        cached: Sequence[KeysAndValues],
        *,
        context: torch.Tensor | None = None,
        embedded: torch.Tensor | None = None,
        inputs: torch.Tensor | None = None,
        mixers: Mapping[int, MixerStates] = NO_STATES,
        watched: dict[int, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Compute the layers of ``hidden [tokens, width]`` in place; return what the output layer reads.

        ``normed`` is what the first layer reads, by default the norm of ``hidden``. ``cached`` is each layer's part of
        the cache, ``positions [slots, rows]`` are rotary positions, ``embedded`` are the embeddings that side blocks
        read, and ``inputs [tokens, layers, width]`` are per-layer inputs. ``context [tokens, width]`` are normalized
        rows before the others, of which each layer only writes keys and values. The hidden states after the layers that
        are keys of ``watched`` are copied to it.
        """
        operations, self._slots = self._operations, len(positions)
        rotary = {kind: self._rotary(hidden, positions, kind) for kind in self._kinds}
        if normed is None:
            normed = operations.add_norm(hidden, None, self._begin)
        for number, layer in enumerate(self._layers):
            if layer.side:
                assert embedded is not None
                normed = self._beside(layer.side, hidden, embedded, rotary, cached)
            read = normed if context is None else torch.cat([context, normed])
            mixed, between = self._mixed_tokens(layer, read, rotary, cached, mixers.get(number)), normed
            if mixed is not None:
                between = operations.add_norm(hidden, mixed, layer.middle)
            if layer.feed:
                fed = layer.feed(normed if layer.is_parallel else between, hidden)
                between = operations.add_norm(hidden, fed, layer.end)
            normed = between
            if layer.last:
                self._change(layer, hidden, None if inputs is None else inputs[:, number])
                normed = operations.add_norm(hidden, None, layer.last)
            if watched is not None and number in watched:
                watched[number] = hidden.clone()
        return normed

    def _beside(
        self,
        side: SidePlan,
        hidden: torch.Tensor,
        embedded: torch.Tensor,
        rotary: dict[str | None, Rotary | None],
        cached: Sequence[KeysAndValues],
    ) -> torch.Tensor:
        """Return what a layer's mixer reads: the norm of the sum of hidden states and a side block's output."""
        operations, plan = self._operations, side.attention
        rows = operations.add_norm(torch.cat([hidden, embedded], dim=1), None, side.begin)
        attended = plan.attended(operations, rows, rotary[plan.rotary], cached[plan.source])
        fed = side.feed(operations.add_norm(attended, None, side.between), hidden)
        return operations.add_norm(side.out(fed), hidden, side.end)

    def _mixed_tokens(
        self,
        layer: LayerPlan,
        rows: torch.Tensor,
        rotary: dict[str | None, Rotary | None],
        cached: Sequence[KeysAndValues],
        states: MixerStates | None,
    ) -> torch.Tensor | None:
        """Return the sum of a layer's mixer and attention outputs, or None if it has neither."""
        mixed, plan = None, layer.attention
        if mixer := layer.parts.mixer:
            assert states
            mixed = mix(mixer, rows.view(self._slots, -1, rows.shape[-1]), states, self._operations.mixers)
            mixed = mixed.view(rows.shape)
            mixed = mixed if layer.mixer_factor == 1.0 else mixed * layer.mixer_factor
        if plan is None:
            return mixed
        attended = plan.attended(self._operations, rows, rotary[plan.rotary], cached[plan.source])
        return attended if mixed is None else attended + mixed

    def _change(self, layer: LayerPlan, hidden: torch.Tensor, layer_input: torch.Tensor | None) -> None:
        """Add a layer's per-layer input to the hidden states and scale them, in place."""
        if (inputs := layer.parts.inputs) and layer_input is not None:
            gated = inputs.activation_module(inputs.gate(hidden)) * layer_input
            self._operations.add_norm(hidden, inputs.out(gated), layer.added)
        if layer.parts.factor is not None:
            hidden.mul_(layer.parts.factor)

    def _rotary(self, hidden: torch.Tensor, positions: torch.Tensor, kind: str | None) -> Rotary | None:
        return None if kind is None else rotary_of(self._parts, hidden, positions, kind)


class ProgramPass:
    """Computes forward passes over one draft tree per slot, for steps with fixed shapes."""

    def __init__(
        self,
        parts: ModelParts[Module],
        windows: list[AttentionWindow],
        operations: Operations,
        hidden: HiddenStates,
        join: Join = join_outputs,
    ) -> None:
        self._parts, self._operations, self._hidden = parts, operations, hidden
        self._ends = EmbeddingAndHead.of(parts)
        self.reads_extent = operations.reads_extent
        self._layers = ProgramLayers(parts, windows, operations, join)
        self._has_experts = any(layer.experts or layer.added_mixture for layer in parts.layers)

    def run(self, step: StepTensors, storage: KVTensors, extent: int) -> StepOutput:
        with experts_on_device(self._parts.model) if self._has_experts else nullcontext():
            if storage.states is None:
                return self._run(step, storage, NO_STATES, extent)
            states, indices = storage.states.part(0, len(step.tokens)), TreeIndices(step)
            mixers = {layer: MixerStates(before, indices) for layer, before in states.by_layer.items()}
            output = self._run(step, storage, mixers, extent)
            return output._replace(states=StackedStates(list(mixers.values()), states, self._operations.mixers.write))

    def _run(self, step: StepTensors, storage: KVTensors, mixers: Mapping[int, MixerStates], extent: int) -> StepOutput:
        operations, parts = self._operations, self._parts
        operations.begin(step, extent)
        operations.move(storage.tensors)
        embedded = parts.embedding(step.tokens)
        inputs = parts.inputs.of(step.tokens, embedded).flatten(0, 1) if parts.inputs else None
        hidden = self._ends.embedded(embedded.flatten(0, 1))
        original = hidden.clone() if parts.family.side else None
        watched = dict.fromkeys(self._hidden.layers, hidden)
        normed = self._layers.through(
            hidden,
            None,
            step.positions,
            storage.layers,
            embedded=original,
            inputs=inputs,
            mixers=mixers,
            watched=watched,
        )
        logits = self._ends.bounded(parts.head(normed))
        if not self._hidden.is_watched:
            return StepOutput(logits, None)
        columns = [normed, *(watched[number] for number in self._hidden.layers)]
        return StepOutput(logits, torch.cat(columns, dim=1).view(*step.tokens.shape, -1))


def _norm_of(module: Module | None, epsilon: float, family: Family) -> Norm | None:
    return None if module is None else Norm.of(module, epsilon, family.norm)


def _fed_with_mixture(
    dense: Matmul, mixture: MixtureParts[Module], rows: torch.Tensor, hidden: torch.Tensor
) -> torch.Tensor:
    """Return the sum of an MLP's and a mixture's output, each normalized; the mixture reads the hidden states."""
    of_mlp, of_input, of_experts = mixture.norms
    _, weights, chosen = mixture.router(hidden)
    mixed: torch.Tensor = of_experts(mixture.experts(of_input(hidden), chosen, weights))
    return mixed.add_(of_mlp(dense(rows)))
