"""Wraps undocumented parts of transformers that hdtool relies on.

Features are detected rather than inferred from versions, since any release may rename them.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from transformers import LogitsProcessor, PreTrainedModel
    from transformers.cache_utils import Cache

CACHE_NAMES = ("cache", "past_key_values", "cache_params")
"""Possible names of the cache argument in ``forward``, its output and ``generate``.

Releases of transformers before 5.24 use the second name, or the third in purely recurrent models.
"""
MASKED_ATTENTION = ("sdpa", "eager")
"""Attention implementations that accept arbitrary masks; flash attention does not."""


def cache_name(module: torch.nn.Module) -> str | None:
    """Return the name of the KV cache argument of a model or layer, or None if it has none."""
    accepted = inspect.signature(module.forward).parameters
    return next((name for name in CACHE_NAMES if name in accepted), None)


def cache_argument(module: torch.nn.Module, cache: Cache | None) -> dict[str, Cache | None]:
    """Return the keyword argument that makes a pass read and write ``cache``."""
    name = cache_name(module)
    assert name is not None, "refuse_by_class refuses models without a cache"
    return {name: cache}


def cache_in(arguments: Mapping[str, Any]) -> Any:
    """Return the KV cache in a pass's arguments or output fields, or None if they have none."""
    return next((arguments[name] for name in CACHE_NAMES if arguments.get(name) is not None), None)


def passes(model: PreTrainedModel, parts: Iterable[torch.Tensor]) -> Iterator[Any]:
    """Run a pass over each consecutive part of a sequence, continuing the cache of the previous pass; yield outputs."""
    cache: Any = None
    for ids in parts:
        out = model(input_ids=ids, use_cache=True, **cache_argument(model, cache))
        cache = cache_in(out)
        yield out


def first_logits(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """Return the logits after a prompt as ``generate`` computes them, with the inputs that it prepares."""
    generated: Any = model.generate(  # type: ignore[operator]
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=1,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return cast(torch.Tensor, generated.logits[0])


def is_own_cache(cache: object) -> bool:
    """Return True if the caller of ``generate`` passed this cache; ``generate`` marks such caches as user-defined."""
    return bool(getattr(cache, "_is_user_defined", False))


def takes(model: PreTrainedModel, argument: str) -> bool:
    """Return True if the model's ``forward`` has a parameter named ``argument``."""
    return argument in inspect.signature(model.forward).parameters


def text_class(settings: Any, *, trust_remote_code: bool) -> Any:
    """Return the auto class that loads a text model with this configuration, or None if transformers has none.

    A multimodal model is loaded as a whole but reads only text.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForMultimodalLM

    brought = getattr(settings, "auto_map", None) or {}
    if trust_remote_code and AutoModelForCausalLM.__name__ in brought:
        return AutoModelForCausalLM
    classes = (AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForMultimodalLM)
    known: list[Any] = [each for each in classes if type(settings) in each._model_mapping]
    named = getattr(settings, "architectures", None) or ()
    # Some configurations belong to both a text model and a multimodal one; the checkpoint says which was saved.
    saved = (each for each in known if len(known) > 1 and each._model_mapping[type(settings)].__name__ in named)
    return next(saved, known[0] if known else None)


def empty_model(settings: Any, **options: Any) -> Any:
    """Return a float32 model with its buffers on the CPU and its parameters on the meta device, without memory."""
    from accelerate import init_empty_weights
    from transformers.initialization import no_init_weights

    with init_empty_weights(include_buffers=False), no_init_weights():
        auto = text_class(settings, trust_remote_code=False)
        return auto.from_config(settings, dtype=torch.float32, trust_remote_code=False, **options)


def is_known_type(model_type: str) -> bool:
    """Return True if transformers has a configuration class for this model type."""
    from transformers import CONFIG_MAPPING

    return model_type in CONFIG_MAPPING


def last_logits_only(model: PreTrainedModel) -> dict[str, int]:
    """Return the argument that limits a pass to the last token's logits; an empty dictionary if the model has none."""
    return {"logits_to_keep": 1} if takes(model, "logits_to_keep") else {}


def last_logits_of_all_rows(model: PreTrainedModel) -> dict[str, Any]:
    """Return the argument that limits a pass to the last token's logits, but lets every layer compute all tokens.

    If ``logits_to_keep`` is a number, some decoders skip tokens in their last layers; for a tensor of positions, they
    don't.
    """
    decoder: Any = model.get_decoder() if hasattr(model, "get_decoder") else None
    slices = decoder is not None and decoder is not model and takes(decoder, "logits_to_keep")
    return {"logits_to_keep": torch.tensor([-1])} if slices else dict(last_logits_only(model))


def processor_of_row(processor: LogitsProcessor, row: int) -> LogitsProcessor | None:
    """Return a logits processor for one row of the batch that ``processor`` was made for.

    Return None if the processor depends on the whole batch.
    """
    from transformers import (
        ClassifierFreeGuidanceLogitsProcessor,
        EncoderNoRepeatNGramLogitsProcessor,
        EncoderRepetitionPenaltyLogitsProcessor,
        PrefixConstrainedLogitsProcessor,
        SynthIDTextWatermarkLogitsProcessor,
        UnbatchedClassifierFreeGuidanceLogitsProcessor,
    )

    of_whole_batch = (
        ClassifierFreeGuidanceLogitsProcessor,
        EncoderNoRepeatNGramLogitsProcessor,
        EncoderRepetitionPenaltyLogitsProcessor,
        SynthIDTextWatermarkLogitsProcessor,
        UnbatchedClassifierFreeGuidanceLogitsProcessor,
    )
    if isinstance(processor, PrefixConstrainedLogitsProcessor):
        allowed = processor._prefix_allowed_tokens_fn
        return PrefixConstrainedLogitsProcessor(lambda _, ids: allowed(row, ids), 1)
    ignored = getattr(processor, "prompt_ignore_length", None)
    if isinstance(ignored, torch.Tensor):  # length of each row's padding, which a repetition penalty ignores
        alone: Any = copy.copy(processor)
        alone.prompt_ignore_length = ignored[row : row + 1]
        return cast("LogitsProcessor", alone)
    return None if isinstance(processor, of_whole_batch) else processor


def is_stateful(model: PreTrainedModel) -> bool:
    """Return True if the model has a recurrent state."""
    return bool(getattr(model, "_is_stateful", False))


def windows_only_the_cache(model: PreTrainedModel, config: Any) -> bool:
    """Return True if transformers drops keys beyond a sliding window from the cache, but the masks ignore the window.

    A pass over a whole prompt then attends to more tokens than passes over its parts.
    """
    if not getattr(config, "sliding_window", None) or getattr(config, "layer_types", None):
        return False
    code = {type(module).__module__ for module in model.modules()}
    if not all(name.split(".")[0] in ("torch", "transformers") for name in code):
        return False
    makers = "create_sliding_window_causal_mask", "create_masks_for_generate"
    named = {
        maker
        for name in code
        for maker in makers
        if name.startswith("transformers.") and maker in vars(sys.modules[name])
    }
    return not named


def attention_of(config: Any) -> str:
    """Return the name of the attention implementation that a configuration selects."""
    return cast(str, config._attn_implementation)


def use_masked_attention(model: PreTrainedModel) -> None:
    """Switch a model to an attention implementation that accepts arbitrary masks, unless it uses one already."""
    if attention_of(model.config) not in MASKED_ATTENTION:
        model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")


@contextmanager
def attention_by(model: PreTrainedModel, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Register ``function`` under ``name``; use it in this block in layers that look up their attention function."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(name, function)
    configs = list(_with_parts(model.config))
    before = list(map(attention_of, configs))
    configs[0]._attn_implementation = name
    try:
        yield
    finally:
        for config, previous in zip(configs, before, strict=True):  # setting a config also sets its later parts
            config._attn_implementation = previous


@contextmanager
def experts_on_device(model: torch.nn.Module) -> Iterator[None]:
    """In this block, make mixture-of-experts layers select the chosen experts' weights on the device.

    The ``eager`` code of transformers reads the chosen experts' indices on the host, which CUDA graphs cannot capture.
    The default, grouped matmuls, has bfloat16 kernels that read the indices on the device.
    """
    configs: list[Any] = list(_with_parts(cast(Any, model).config))
    before = [getattr(config, "_experts_implementation", None) for config in configs]
    for config, previous in zip(configs, before, strict=True):  # setting a config also sets its later parts
        config._experts_implementation = "grouped_mm" if previous == "eager" else previous
    try:
        yield
    finally:
        for config, previous in zip(configs, before, strict=True):
            config._experts_implementation = previous


def _with_parts(config: Any) -> Iterator[Any]:
    """Yield a configuration and, recursively, the configurations of its parts, such as a vision model."""
    yield config
    for name in getattr(config, "sub_configs", None) or ():
        if (part := getattr(config, name, None)) is not None:
            yield from _with_parts(part)


def must_pass_in_step(model: PreTrainedModel) -> bool:
    """Return True if several processes share the weights (ZeRO-3, FSDP) and so must make equally many passes."""
    from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
    from transformers.integrations.fsdp import is_fsdp_managed_module

    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return several and bool(is_deepspeed_zero3_enabled() or is_fsdp_managed_module(model))


def argument_of_generate(name: str) -> Any:
    """Return the value of an argument of the enclosing ``generate`` call, or None without such a call or argument.

    transformers 5 passes neither ``streamer`` nor ``synced_gpus`` to a custom generate function, although it has
    already put the prompt into the streamer, whose reader would wait forever. Both are local variables of ``generate``.
    """
    from transformers import GenerationMixin

    code = inspect.unwrap(GenerationMixin.generate).__code__
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not code:
        frame = cast(Any, frame.f_back)
    return frame.f_locals.get(name) if frame is not None else None
