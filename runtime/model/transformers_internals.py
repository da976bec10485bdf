"""Undocumented parts of transformers that hdtool relies on.

All checks are for features, never versions, so that a release may rename them.
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
"""Names of the cache in ``forward``, its output and ``generate``; before 5.24 it has the second one, or the third in
models of recurrent layers alone."""
MASKED_ATTENTION = ("sdpa", "eager")
"""Attention implementations that take arbitrary masks; flash attention does not."""


def cache_name(module: torch.nn.Module) -> str | None:
    """The argument by which a model or one of its layers takes its KV cache; None if it takes none."""
    accepted = inspect.signature(module.forward).parameters
    return next((name for name in CACHE_NAMES if name in accepted), None)


def cache_argument(module: torch.nn.Module, cache: Cache | None) -> dict[str, Cache | None]:
    """The arguments of a pass that reads and writes ``cache``."""
    name = cache_name(module)
    assert name is not None, "refuse_by_class refuses models without a cache"
    return {name: cache}


def cache_in(arguments: Mapping[str, Any]) -> Any:
    """The KV cache in a pass's arguments or output fields, or None."""
    return next((arguments[name] for name in CACHE_NAMES if arguments.get(name) is not None), None)


def passes(model: PreTrainedModel, parts: Iterable[torch.Tensor]) -> Iterator[Any]:
    """The outputs of passes over consecutive parts of a sequence, each of which continues the one before."""
    cache: Any = None
    for ids in parts:
        out = model(input_ids=ids, use_cache=True, **cache_argument(model, cache))
        cache = cache_in(out)
        yield out


def first_logits(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """The logits after a prompt as ``generate`` computes them, whatever else it gives to the model."""
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
    """True if the caller of ``generate`` passed this cache: ``generate`` marks the caches it is given."""
    return bool(getattr(cache, "_is_user_defined", False))


def takes(model: PreTrainedModel, argument: str) -> bool:
    """True if ``forward`` names this argument."""
    return argument in inspect.signature(model.forward).parameters


def text_class(settings: Any, *, trust_remote_code: bool) -> Any:
    """The auto class that loads a model of text by its configuration; None if the library has none.

    Multimodal checkpoints load whole and read text alone.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForMultimodalLM

    brought = getattr(settings, "auto_map", None) or {}
    if trust_remote_code and AutoModelForCausalLM.__name__ in brought:
        return AutoModelForCausalLM
    classes = (AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForMultimodalLM)
    known: list[Any] = [each for each in classes if type(settings) in each._model_mapping]
    named = getattr(settings, "architectures", None) or ()
    # Some configurations are those of a text model and of a whole one: the checkpoint says which it is.
    saved = (each for each in known if len(known) > 1 and each._model_mapping[type(settings)].__name__ in named)
    return next(saved, known[0] if known else None)


def is_known_type(model_type: str) -> bool:
    """True if the library has a configuration of this type of model."""
    from transformers import CONFIG_MAPPING

    return model_type in CONFIG_MAPPING


def last_logits_only(model: PreTrainedModel) -> dict[str, int]:
    """The option of a pass by which the model computes only the logits after its last token, if it has one."""
    return {"logits_to_keep": 1} if takes(model, "logits_to_keep") else {}


def last_logits_of_all_rows(model: PreTrainedModel) -> dict[str, Any]:
    """The option for the last logits alone in a pass in which every layer computes all tokens.

    Decoders that take it themselves leave tokens out of their last layers for a number, but not for positions.
    """
    decoder: Any = model.get_decoder() if hasattr(model, "get_decoder") else None
    slices = decoder is not None and decoder is not model and takes(decoder, "logits_to_keep")
    return {"logits_to_keep": torch.tensor([-1])} if slices else dict(last_logits_only(model))


def processor_of_row(processor: LogitsProcessor, row: int) -> LogitsProcessor | None:
    """A processor of a batch as it treats one of its rows alone; None if it has a state of the whole batch."""
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
    if isinstance(ignored, torch.Tensor):  # the padding of each row, which a repetition penalty leaves out
        alone: Any = copy.copy(processor)
        alone.prompt_ignore_length = ignored[row : row + 1]
        return cast("LogitsProcessor", alone)
    return None if isinstance(processor, of_whole_batch) else processor


def is_stateful(model: PreTrainedModel) -> bool:
    """True if the model has a recurrent state beside its KV cache."""
    return bool(getattr(model, "_is_stateful", False))


def windows_only_the_cache(model: PreTrainedModel, config: Any) -> bool:
    """True if the library drops keys beyond a sliding window, which the masks of this model's code do not know.

    Its pass over a whole prompt then attends to more than passes over parts of it.
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
    """The attention implementation that a configuration selects."""
    return cast(str, config._attn_implementation)


def use_masked_attention(model: PreTrainedModel) -> None:
    """Select an attention implementation that takes arbitrary masks."""
    if attention_of(model.config) not in MASKED_ATTENTION:
        model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")


@contextmanager
def attention_by(model: PreTrainedModel, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """In this block the layers of a model that look attention up attend by ``function``."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(name, function)
    configs = list(_with_parts(model.config))
    before = list(map(attention_of, configs))
    configs[0]._attn_implementation = name
    try:
        yield
    finally:
        for config, previous in zip(configs, before, strict=True):  # each sets that of its parts, which follow it
            config._attn_implementation = previous


@contextmanager
def experts_on_device(model: torch.nn.Module) -> Iterator[None]:
    """In this block mixtures of experts choose the weights of a token on its device.

    The library's ``eager`` code reads on the host which experts are used, and no graph can record that. Its grouped
    matmuls, which are what it uses unless told otherwise, are in bfloat16 kernels that read the choice themselves.
    """
    configs: list[Any] = list(_with_parts(cast(Any, model).config))
    before = [getattr(config, "_experts_implementation", None) for config in configs]
    for config, previous in zip(configs, before, strict=True):  # each sets that of its parts, which follow it
        config._experts_implementation = "grouped_mm" if previous == "eager" else previous
    try:
        yield
    finally:
        for config, previous in zip(configs, before, strict=True):
            config._experts_implementation = previous


def _with_parts(config: Any) -> Iterator[Any]:
    """A configuration and its parts' configurations, such as one for images."""
    yield config
    for name in getattr(config, "sub_configs", None) or ():
        if (part := getattr(config, name, None)) is not None:
            yield from _with_parts(part)


def must_pass_in_step(model: PreTrainedModel) -> bool:
    """True if processes share the weights so that all of them must make equally many passes (ZeRO-3, FSDP)."""
    from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
    from transformers.integrations.fsdp import is_fsdp_managed_module

    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return several and bool(is_deepspeed_zero3_enabled() or is_fsdp_managed_module(model))


def argument_of_generate(name: str) -> Any:
    """The value of an argument of the enclosing ``generate`` call.

    transformers 5 does not pass ``streamer`` and ``synced_gpus`` to a callable, although it has put the prompt into
    the streamer, so its reader would wait forever. Both are local variables of that frame.
    """
    from transformers import GenerationMixin

    code = inspect.unwrap(GenerationMixin.generate).__code__
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not code:
        frame = cast(Any, frame.f_back)
    return frame.f_locals.get(name) if frame is not None else None
