"""``generate`` of an exported model folder: it drafts wherever hdtool can decode the call."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from hdtool.data.errors import HdtoolError
from hdtool.runtime.config import DecodeConfig, ModelConfig, StoresConfig
from hdtool.runtime.integrations.generate_request import UnsupportedCallError
from hdtool.runtime.integrations.hf_generate import Generator
from hdtool.runtime.model.load import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ATTRIBUTE = "_hdtool_generator"


class _Holder:
    """Keeps the generator of a model; copies of the model get one of their own."""

    def __init__(self) -> None:
        self.generator: Generator | None = None

    def __reduce__(self) -> tuple[type[_Holder], tuple[()]]:
        return _Holder, ()


def generate(
    model: PreTrainedModel, decoding: Mapping[str, Any], stores: Mapping[str, Any], *arguments: Any, **options: Any
) -> Any:
    """Called instead of ``model.generate``, with the same arguments; the settings are those of the exported folder.

    Calls that hdtool cannot decode, such as beams, are left to the library, with a warning.
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
            raise  # it has the prompt already, and would get it twice
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
