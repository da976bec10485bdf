"""The ``generate`` function of exported model folders; it drafts in every call that hdtool can decode."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from hdtool.data.errors import HdtoolError
from hdtool.runtime.integrations.generate_request import UnsupportedCallError
from hdtool.runtime.integrations.hf_generate import Generator
from hdtool.runtime.settings.decoding import DecodeConfig, StoresConfig
from hdtool.runtime.settings.model import ModelConfig
from hdtool.runtime.target.load import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ATTRIBUTE = "_hdtool_generator"


class _Holder:
    """Holds a model's generator; a copy of the model gets an empty holder, so that it makes a generator of its own."""

    def __init__(self) -> None:
        self.generator: Generator | None = None

    def __reduce__(self) -> tuple[type[_Holder], tuple[()]]:
        return _Holder, ()


def generate(
    model: PreTrainedModel, decoding: Mapping[str, Any], stores: Mapping[str, Any], *arguments: Any, **options: Any
) -> Any:
    """Generate as ``model.generate`` does, with the same arguments, and draft with the exported folder's settings.

    Calls that hdtool cannot decode, such as beam search, are passed on to transformers with a warning, or raise
    UnsupportedCallError if they have a streamer. Calls with another custom or assisted generation are passed on, too,
    as are all calls if no drafter can be made, with a warning at the first.
    """
    library = cast(Any, type(model)).generate
    if options.get("custom_generate") is not None or options.get("assistant_model") is not None:
        return library(model, *arguments, **options)
    generator = _generator(model, decoding, stores)
    if generator is None:
        return library(model, *arguments, **options)
    try:
        return library(model, *arguments, custom_generate=generator, **options)
    except UnsupportedCallError as error:
        if options.get("streamer") is not None:
            raise  # the streamer has already received the prompt, and would receive it twice
        warnings.warn(f"{error}: it is answered without drafts", stacklevel=3)
        return library(model, *arguments, **options)


def _generator(model: PreTrainedModel, decoding: Mapping[str, Any], stores: Mapping[str, Any]) -> Generator | None:
    holder = model.__dict__.get(ATTRIBUTE)
    if holder is None:
        holder = model.__dict__[ATTRIBUTE] = _Holder()
        try:
            tokenizer = load_tokenizer(ModelConfig(model.name_or_path))
            config: dict[str, Any] = {
                name: tuple(value) if isinstance(value, list) else value for name, value in decoding.items()
            }
            holder.generator = Generator.drafting(tokenizer, DecodeConfig(**config), StoresConfig(**stores))
        except HdtoolError as error:
            warnings.warn(f"{error}: this model answers without drafts", stacklevel=4)
    generator: Generator | None = holder.generator
    return generator
