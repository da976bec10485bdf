"""Recognizes recurrent mixers, short convolutions and mixtures of experts among Transformers' modules."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import torch
from torch.nn import Conv1d, Identity, Module, Parameter

if TYPE_CHECKING:
    from hdtool.runtime.program.model_parts import EngineSupport

Matmul = TypeVar("Matmul", bound=Module)
SHORT_CONVOLUTION, DELTA_RULE, MAMBA2 = "short convolution", "gated delta rule", "Mamba-2"
DELTA_ATTENTION = "Kimi's delta attention"
"""A gated delta rule with a separate decay for each key channel."""
STATE_ATTRIBUTES = frozenset({
    "activation", "allow_neg_eigval", "conv_dim", "conv_kernel_size", "eps", "groups_time_state_size", "head_dim",
    "head_k_dim", "head_v_dim", "hidden_size", "intermediate_size", "key_dim", "layer_idx", "layer_norm_epsilon",
    "layer_type", "lower_bound", "mamba_rms_norm", "n_groups", "num_heads", "num_k_heads", "num_v_heads", "qkv_dim",
    "safe_gate", "ssm_in_multiplier", "ssm_state_size", "time_step_floor", "time_step_max", "time_step_min",
    "time_step_rank", "use_bias", "use_conv_bias", "use_mem_eff_path", "value_dim", "chunk_size", "time_step_limit",
    "bias", "training", "config",
})  # fmt: skip
"""Attributes of mixers that this file reads, whose values follow from weight shapes, or that only training reads."""
UNLIMITED = 0.0, float("inf")


@dataclass(frozen=True)
class MixerParts(Generic[Matmul]):
    """The modules and shapes of a mixer."""

    kind: str
    module: Module
    inputs: tuple[Matmul, ...]
    out: Matmul
    convolution: Conv1d
    norm: Module | None = None
    """Gated norm of the mixer's output; None for a short convolution, and for a scan whose output is only gated."""
    key_heads: int = 0
    heads: int = 0
    key_width: int = 0
    value_width: int = 0
    strength: float = 1.0
    """Factor that scales a delta rule's write strengths."""
    gate: tuple[Matmul, ...] = ()
    """Matmuls, one after another, that compute the gates of a delta attention's output."""
    decay: Module | None = None
    """Module that computes the logarithms of a delta attention's decays."""
    decay_inputs: tuple[Matmul, ...] = ()
    """Matmuls of ``decay``, one after another."""
    factor: float = 1.0
    """Scales what a scan's input projection reads."""
    step_limit: tuple[float, float] = UNLIMITED
    """Bounds of a scan's time steps in passes over several tokens; Transformers decodes without them."""

    @property
    def layer(self) -> int:
        """Index of the cache layer that holds the mixer's states."""
        return int(cast(Any, self.module).layer_idx)

    @property
    def matmuls(self) -> tuple[Matmul, ...]:
        return *self.inputs, *self.gate, *self.decay_inputs, self.out

    @property
    def called(self) -> tuple[Module, ...]:
        """Modules that ``ProgramPass`` always calls: matmuls and the module of the decays, but not the gated norm."""
        return *self.matmuls, *filter(None, (self.decay,))

    @property
    def decay_bound(self) -> float:
        """Lower bound of the logarithms of a delta attention's decays; 0 if they are unbounded."""
        return float(cast(Any, self.decay).lower_bound) if getattr(self.decay, "safe_gate", False) else 0.0

    @property
    def scales(self) -> torch.Tensor | None:
        """Factors of the columns that a scan's input projection computes; None if they aren't scaled."""
        return self.module._buffers.get("mup_vector")

    @property
    def input_factors(self) -> list[Any]:
        """Numbers and tensors whose product scales the output of a scan's input projection; empty for no factors."""
        return [*([] if self.factor == 1 else [self.factor]), *([] if self.scales is None else [self.scales])]

    @property
    def gates_after_norm(self) -> bool:
        """True if a gate scales the gated norm's output, not its input."""
        return bool(getattr(self.norm, "norm_before_gate", False))

    @property
    def norms_groups(self) -> bool:
        """True if the gated norm normalizes groups of heads, one per key head, and its weight spans all heads."""
        return self.kind == MAMBA2

    @property
    def rounds_norm(self) -> bool:
        """True if the gated norm rounds normalized values before it multiplies them by the weight."""
        return self.kind != DELTA_ATTENTION and not hasattr(self.norm, "norm_before_gate")

    @property
    def channels(self) -> int:
        return self.convolution.out_channels

    @property
    def taps(self) -> int:
        return self.convolution.kernel_size[0]

    @property
    def parameters(self) -> dict[str, torch.Tensor]:
        """Parameters of the mixer's module, or of the module of its decays, without those of submodules."""
        holder = self.module if self.decay is None else self.decay
        return {name: weight for name, weight in holder._parameters.items() if weight is not None}


def mixer_parts(module: Any, layer_index: int, support: EngineSupport[Matmul]) -> MixerParts[Matmul] | None:
    """Return the parts of a mixer; None if its class, attributes or shape are unsupported."""
    read = READERS.get(type(module).__name__)
    if read is None or getattr(module, "layer_idx", None) != layer_index:
        return None
    try:
        parts = read(module)
    except AttributeError:
        return None
    attributes = {*vars(module), *vars(parts.decay or module)}
    if any(name not in STATE_ATTRIBUTES and not name.startswith("_") and name != "act" for name in attributes):
        return None
    small_tensors = [*parts.parameters.values(), *tensors_of(parts.convolution)]
    small_tensors += tensors_of(parts.norm) if parts.norm else []
    known = [*small_tensors, *(weight for matmul in parts.matmuls for weight in tensors_of(matmul))]
    known += [] if parts.scales is None else [parts.scales]
    is_whole = (
        all(map(support.is_linear, parts.matmuls))
        and all(map(support.is_mixer_weight or support.is_readable, small_tensors))
        and {id(tensor) for tensor in tensors_of(module)} == {id(tensor) for tensor in known}
        and not any("forward" in vars(submodule) for submodule in module.modules())
    )
    return parts if is_whole and _is_causal(parts.convolution) and _fits(parts, support) else None


def tensors_of(module: Module) -> Iterator[torch.Tensor]:
    """Yield the parameters and buffers of a module and its submodules."""
    yield from module.parameters()
    yield from module.buffers()


def epsilon_of(norm: Module, parameters: tuple[str, ...] = ("weight",)) -> float | None:
    """Return a norm's epsilon; None if that isn't a float, or the module has submodules or other parameters."""
    epsilon = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    held = [name for name, parameter in norm._parameters.items() if parameter is not None]
    is_plain = sorted(held) == sorted(parameters) and not norm._modules
    return epsilon if is_plain and isinstance(epsilon, float) else None


def _is_causal(convolution: Any) -> bool:
    """Return True for a depthwise convolution with the padding of a causal convolution."""
    return (
        type(convolution) is Conv1d
        and convolution.groups == convolution.in_channels == convolution.out_channels
        and convolution.stride == convolution.dilation == (1,)
        and convolution.kernel_size[0] > 1
        and convolution.padding == (convolution.kernel_size[0] - 1,)
    )


def _fits(parts: MixerParts[Any], support: EngineSupport[Any]) -> bool:
    """Return True if the weight shapes are consistent and all widths are multiples of ``support.divisor``."""
    heads, keys, values = parts.heads, parts.key_heads * parts.key_width, parts.heads * parts.value_width
    hidden, chains = parts.out.out_features, [chain for chain in (parts.gate, parts.decay_inputs) if chain]
    sizes = {name: weight.numel() for name, weight in parts.parameters.items()}
    channels, read, chained = 2 * keys + values, values, list[int]()
    expected_sizes = dict.fromkeys(HEAD_PARAMETERS[parts.kind], heads)
    if parts.kind == SHORT_CONVOLUTION:
        channels, outputs, read = hidden, [3 * hidden], hidden
    elif parts.kind == DELTA_ATTENTION:
        outputs, chained, expected_sizes["dt_bias"] = [keys, keys, values, heads], [values, keys], keys
    elif parts.kind == DELTA_RULE:
        first, *rest = [keys, keys, values] if len(parts.inputs) > 4 else [channels]
        outputs = [first, values, heads, heads, *rest] if len(parts.inputs) > 2 else [channels + values, 2 * heads]
    else:
        outputs = [values + channels + heads]
    widths = [channels] if parts.kind == SHORT_CONVOLUTION else [channels, parts.key_width, parts.value_width, values]
    return (
        parts.channels == channels
        and [layer.out_features for layer in parts.inputs] == outputs
        and all(layer.in_features == hidden for layer in (*parts.inputs, *(chain[0] for chain in chains)))
        and [chain[-1].out_features for chain in chains] == chained
        and all(first.out_features == next_.in_features for chain in chains for first, next_ in pairwise(chain))
        and parts.out.in_features == read
        and sizes == expected_sizes
        and (parts.scales is None or parts.scales.numel() == sum(outputs))
        and all(width > 0 and width % support.divisor == 0 for width in widths)
        and (parts.kind == SHORT_CONVOLUTION or heads % parts.key_heads == 0)
        and (parts.norm is None or _norms(parts))
    )


HEAD_PARAMETERS = {
    SHORT_CONVOLUTION: (),
    DELTA_RULE: ("A_log", "dt_bias"),
    DELTA_ATTENTION: ("A_log", "dt_bias"),
    MAMBA2: ("A_log", "dt_bias", "D"),
}
"""Names of the parameters with one value per head, by kind of mixer; ``dt_bias`` may have one per key channel."""


def _norms(parts: MixerParts[Any]) -> bool:
    """Return True if the gated norm has the known activation, and spans one head, or a group of heads in Mamba-2."""
    norm: Any = parts.norm
    weight = norm._parameters.get("weight")
    values = parts.heads * parts.value_width
    groups = parts.key_heads if parts.kind == MAMBA2 else 0
    return (
        set(norm._parameters) == {"weight"}
        and weight.shape == (values if groups else parts.value_width,)
        and isinstance(norm.variance_epsilon, float)
        and (not groups or getattr(norm, "n_groups", values / getattr(norm, "group_size", values)) == groups)
        and getattr(norm, "activation", "silu") == ("sigmoid" if parts.kind == DELTA_ATTENTION else "silu")
    )


def _short_convolution(module: Any) -> MixerParts[Any]:
    return MixerParts(SHORT_CONVOLUTION, module, (module.in_proj,), module.out_proj, module.conv)


def _delta_rule(module: Any) -> MixerParts[Any]:
    return _delta_parts(module, (module.in_proj_qkv, module.in_proj_z, module.in_proj_b, module.in_proj_a))


def _delta_rule_by_heads(module: Any) -> MixerParts[Any]:
    """Return the parts of a delta rule whose inputs come from two projections.

    The first projection gives queries, keys, values and gates, and the second gives write strengths and time steps.
    """
    return _delta_parts(module, (module.in_proj_qkvz, module.in_proj_ba))


def _delta_parts(module: Any, inputs: tuple[Any, ...]) -> MixerParts[Any]:
    _require_silu(module)
    return MixerParts(
        DELTA_RULE, module, inputs, module.out_proj, module.conv1d, module.norm,
        module.num_k_heads, module.num_v_heads, module.head_k_dim, module.head_v_dim,
    )  # fmt: skip


def _delta_rule_separate(module: Any) -> MixerParts[Any]:
    """Return the parts of a delta rule with separate projections for queries, keys and values."""
    _require_silu(module)
    return MixerParts(
        DELTA_RULE, module,
        (module.q_proj, module.g_proj, module.b_proj, module.a_proj, module.k_proj, module.v_proj),
        module.o_proj, module.conv1d, module.o_norm,
        module.num_k_heads, module.num_v_heads, module.head_k_dim, module.head_v_dim,
        2.0 if module.allow_neg_eigval else 1.0,
    )  # fmt: skip


def _delta_attention(module: Any) -> MixerParts[Any]:
    _require_silu(module)
    gate = (module.g_proj,) if "g_proj" in module._modules else (module.g_a_proj, module.g_b_proj)
    heads, width, decay = module.num_heads, module.head_dim, module.forget_gate
    decay_inputs = (decay.f_proj,) if "f_proj" in decay._modules else (decay.f_a_proj, decay.f_b_proj)
    return MixerParts(
        DELTA_ATTENTION, module, (module.q_proj, module.k_proj, module.v_proj, module.b_proj), module.o_proj,
        module.conv1d, module.o_norm, heads, heads, width, width, gate=gate, decay=decay,
        decay_inputs=decay_inputs,
    )  # fmt: skip


def _mamba2(module: Any) -> MixerParts[Any]:
    _require_silu(module)
    return MixerParts(
        MAMBA2, module, (module.in_proj,), module.out_proj, module.conv1d,
        module.norm if getattr(module, "mamba_rms_norm", True) else None,
        module.n_groups, module.num_heads, module.ssm_state_size, module.head_dim,
        factor=float(getattr(module, "ssm_in_multiplier", 1.0)), step_limit=tuple(module.time_step_limit),
    )  # fmt: skip


def _require_silu(module: Any) -> None:
    if module.activation != "silu":
        raise AttributeError("another activation")


READERS: Mapping[str, Callable[[Any], MixerParts[Any]]] = {
    **dict.fromkeys(("Lfm2ShortConv", "Lfm2MoeShortConv", "Lfm3ShortConv"), _short_convolution),
    **dict.fromkeys(("Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet"), _delta_rule),
    "Qwen3NextGatedDeltaNet": _delta_rule_by_heads,
    "OlmoHybridGatedDeltaNet": _delta_rule_separate,
    **dict.fromkeys(("KimiLinearDeltaAttention", "BailingHybridDeltaAttention"), _delta_attention),
    **dict.fromkeys(("BambaMixer", "GraniteMoeHybridMambaLayer", "FalconH1Mixer"), _mamba2),
    **dict.fromkeys(("Mamba2Mixer", "NemotronHMamba2Mixer", "Zamba2MambaMixer"), _mamba2),
}
"""Functions that return a mixer's parts, by the class name of its module."""


BLOCK_ATTRIBUTES = frozenset({
    "config", "hidden_dim", "input_size", "jitter_noise", "num_experts", "top_k", "training", "use_expert_bias",
})  # fmt: skip
ROUTER_ATTRIBUTES = frozenset({
    "hidden_dim", "norm_min", "norm_topk_prob", "num_experts", "num_group", "routed_scaling_factor", "top_k",
    "topk_group", "topk_method", "training", "use_expert_bias",
})  # fmt: skip
"""Attributes of routers that this file reads, whose values follow from weight shapes, or that only training reads."""


@dataclass(frozen=True)
class ExpertKind:
    """Class and module names of a model type's mixture of experts, and how the mixture's router scores experts."""

    block: str
    """Class name of the mixture, which engines without their own code for experts call."""
    router: str
    """Class name of the router."""
    gate: str = "gate"
    """Attribute name of the router in the mixture's module."""
    added_block: str = ""
    """Attribute name of the mixture in layers that add it to an MLP; empty if the mixture replaces the MLP."""
    shared: str = ""
    """Attribute name of the shared expert's MLP; empty without a shared expert."""
    shared_gate: str = ""
    """Name of the linear layer whose sigmoid scales the shared expert's output; empty if it isn't scaled."""
    has_sigmoids: bool = False
    """True if routing weights are sigmoids of the router's scores instead of a softmax."""
    correction: str = ""
    """Path of a tensor that is added to routing weights for the top-k choice only; empty without one."""
    sum_offset: float = 0.0
    """Constant added to the sum by which routing weights are divided."""
    renormalizes: bool = True
    """Default of the router's ``norm_topk_prob``, True if chosen experts' routing weights are divided by their sum."""
    group_top: int = 2
    """Number of best experts in a group whose summed scores rank the group."""
    identities: Collection[str] = ()
    """Names of modules that are supported only if each is an ``Identity``."""


@dataclass(frozen=True)
class Router:
    """Weights and settings of a router, which chooses each token's experts."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    top: int
    """Number of experts per token."""
    has_sigmoids: bool
    """True if routing weights are sigmoids of the scores instead of a softmax."""
    renormalizes: bool
    """True if the routing weights of the chosen experts are divided by their sum."""
    correction: torch.Tensor | None
    """Added to routing weights for the top-k choice only; None without a correction."""
    groups: int
    used_groups: int
    """Number of groups whose experts may be chosen for a token."""
    group_top: int
    """Number of best experts in a group whose summed scores rank the group."""
    factor: float
    """Scales the final routing weights."""
    sum_offset: float
    """Constant added to the sum by which routing weights are divided."""
    min_sum: float
    """Lower bound of the sum by which routing weights are divided."""


def qwen_experts(family: str) -> ExpertKind:
    """Return the ``ExpertKind`` of Qwen mixtures with a gated shared expert; ``family`` prefixes their class names."""
    return ExpertKind(
        f"{family}SparseMoeBlock",
        f"{family}TopKRouter",
        shared="shared_expert",
        shared_gate="shared_expert_gate",
    )


def deepseek_experts(prefix: str) -> ExpertKind:
    """Return the ``ExpertKind`` of mixtures like DeepSeek-V3's; ``prefix`` begins their class names."""
    return ExpertKind(
        f"{prefix}MoE",
        f"{prefix}TopkRouter",
        shared="shared_experts",
        has_sigmoids=True,
        correction="gate.e_score_correction_bias",
        sum_offset=1e-20,
    )


def router_of(block: Any, kind: ExpertKind) -> Router | None:
    """Return a mixture's router; None if modules, attributes, tensors or their shapes are unknown."""
    gate = block._modules.get(kind.gate)
    if gate is None or type(gate).__name__ != kind.router:
        return None
    checked = (block, *(module for name, module in block.named_modules() if name.split(".")[0] == kind.gate))
    known_names = {kind.gate, "experts", *filter(None, [kind.shared, kind.shared_gate])}
    present = {name for name, module in block._modules.items() if module is not None}
    present -= {name for name in kind.identities if type(block._modules.get(name)) is Identity}
    if not {kind.gate, "experts"} <= present <= known_names or any("forward" in vars(module) for module in checked):
        return None
    if not _knows(block, BLOCK_ATTRIBUTES | {kind.shared}) or not _knows(gate, ROUTER_ATTRIBUTES):
        return None
    weight, bias, correction = gate._parameters.get("weight"), gate._parameters.get("bias"), _tensor(block, kind)
    tensors = [tensor for tensor in (weight, bias, correction) if tensor is not None]
    all_tensors = [*block._parameters.values(), *block._buffers.values(), *gate.parameters(), *gate.buffers()]
    experts = len(block.experts.down_proj)
    groups = 1 if getattr(gate, "topk_method", "") == "greedy" else getattr(gate, "num_group", 1)
    used_groups = getattr(gate, "topk_group", 1) if groups > 1 else 1
    if (
        weight is None
        or {id(tensor) for tensor in all_tensors} != {id(tensor) for tensor in tensors}
        or weight.dim() != 2
        or any(tensor.numel() != experts for tensor in tensors if tensor is not weight)
        or len(weight) != experts
        or (groups > 1 and (experts % groups or experts // groups < kind.group_top))
        or (groups > 1 and (correction is None) != (kind.group_top == 1))
    ):
        return None
    return Router(
        weight,
        bias,
        int(gate.top_k),
        kind.has_sigmoids,
        bool(getattr(gate, "norm_topk_prob", kind.renormalizes)),
        correction,
        int(groups),
        int(used_groups),
        kind.group_top,
        float(getattr(gate, "routed_scaling_factor", 1.0)),
        kind.sum_offset,
        float(getattr(gate, "norm_min", 0.0)),
    )


def _tensor(block: Module, kind: ExpertKind) -> torch.Tensor | None:
    path, _, name = kind.correction.rpartition(".")
    try:
        tensor: Any = getattr(block.get_submodule(path), name, None) if name else None
    except AttributeError:
        return None
    return tensor if isinstance(tensor, (torch.Tensor, Parameter)) else None


def _knows(module: Module, attributes: frozenset[str]) -> bool:
    return all(name in attributes or name.startswith("_") for name in vars(module))
