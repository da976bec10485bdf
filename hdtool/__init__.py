"""Speed up generation with transformers models, without changing the output, by drafting tokens from databases.

This is the public interface, and every other module may change between releases. A name is imported at its first use,
so that ``import hdtool`` loads neither torch nor transformers.
"""

from __future__ import annotations

from importlib import import_module, metadata
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hdtool.builders.evaluation.verify import Verifier
    from hdtool.data import demo
    from hdtool.data.errors import HdtoolError
    from hdtool.data.prompts import Grammar
    from hdtool.runtime.answering.answer_plan import sampler_for
    from hdtool.runtime.core.request import Request
    from hdtool.runtime.core.session import decode, decode_batch
    from hdtool.runtime.core.step import Stats
    from hdtool.runtime.drafters.drafter_factory import drafter_for
    from hdtool.runtime.integrations.hf_generate import Generator
    from hdtool.runtime.settings.decoding import DecodeConfig, StoresConfig
    from hdtool.runtime.settings.draft_sources import Source, register
    from hdtool.runtime.settings.model import ModelConfig, SamplingConfig
    from hdtool.runtime.stores.store_set import StoreSet, open_store
    from hdtool.runtime.target.load import load

    __version__: str

__all__ = [
    "DecodeConfig",
    "Generator",
    "Grammar",
    "HdtoolError",
    "ModelConfig",
    "Request",
    "SamplingConfig",
    "Source",
    "Stats",
    "StoreSet",
    "StoresConfig",
    "Verifier",
    "__version__",
    "decode",
    "decode_batch",
    "demo",
    "drafter_for",
    "load",
    "open_store",
    "register",
    "sampler_for",
]

_PLACES = {
    "DecodeConfig": "hdtool.runtime.settings.decoding",
    "Generator": "hdtool.runtime.integrations.hf_generate",
    "Grammar": "hdtool.data.prompts",
    "HdtoolError": "hdtool.data.errors",
    "ModelConfig": "hdtool.runtime.settings.model",
    "Request": "hdtool.runtime.core.request",
    "SamplingConfig": "hdtool.runtime.settings.model",
    "Source": "hdtool.runtime.settings.draft_sources",
    "Stats": "hdtool.runtime.core.step",
    "StoreSet": "hdtool.runtime.stores.store_set",
    "StoresConfig": "hdtool.runtime.settings.decoding",
    "Verifier": "hdtool.builders.evaluation.verify",
    "decode": "hdtool.runtime.core.session",
    "decode_batch": "hdtool.runtime.core.session",
    "drafter_for": "hdtool.runtime.drafters.drafter_factory",
    "load": "hdtool.runtime.target.load",
    "open_store": "hdtool.runtime.stores.store_set",
    "register": "hdtool.runtime.settings.draft_sources",
    "sampler_for": "hdtool.runtime.answering.answer_plan",
}
"""Module that defines each public name."""

_FOLDER = Path(__file__).parent
if not (_FOLDER / "runtime").exists():
    # In a checkout, the packages are next to this folder. An installation maps them into it.
    __path__.append(str(_FOLDER.parent))


def __getattr__(name: str) -> object:
    value: object
    if name == "__version__":
        value = metadata.version("hdtool")
    elif name == "demo":
        value = import_module("hdtool.data.demo")
    elif name in _PLACES:
        value = getattr(import_module(_PLACES[name]), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
