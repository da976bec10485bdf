"""Plug-in in the entry point group ``llm``: the models of the command-line tool ``llm`` that hdtool runs.

``llm`` imports this module whenever it starts, so torch and the model are loaded for the first prompt only.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any, TypeVar, get_origin, get_type_hints

import click
import llm
from llm.parts import TextPart
from pydantic import Field, create_model

from hdtool.data import demo
from hdtool.data.errors import HdtoolError, ModelError, PromptError
from hdtool.data.output_files import OutputFile
from hdtool.data.own_files import json_object
from hdtool.data.prompts import Grammar, Message, Prompt
from hdtool.data.row_readers import RowError, decode_utf8, parse_json
from hdtool.runtime.settings.decoding import METHODS, DecodeConfig, StoresConfig
from hdtool.runtime.settings.model import ModelConfig, SamplingConfig
from hdtool.runtime.settings.settings_base import Settings

if TYPE_CHECKING:
    from hdtool.runtime.answering.answer_prompts import Answerer
    from hdtool.runtime.core.step import Stats

PREFIX = "hdtool/"
"""Beginning of the names of hdtool's models."""
MAX_TOKENS = 1024
OFFERED: Mapping[type[Settings], tuple[str, ...]] = {
    ModelConfig: ("device", "dtype", "quantization", "activations", "threads", "revision", "gguf_file"),
    DecodeConfig: ("method", "sources", "draft_tokens", "history"),
    StoresConfig: ("model_db", "corpus_db"),
    SamplingConfig: ("temperature", "top_p", "top_k", "repetition_penalty", "seed", "stop"),
}
"""Settings that users can pass as options of a prompt, besides ``max_tokens``."""
HELPS = {"method": f"Drafting method: {', '.join(METHODS)}.", "stop": "Text that ends an answer and is cut off."}
"""Help texts that replace those of the settings."""
DEMO_MODELS = {name: name for name in demo.NAMES}
"""Places, by name, of the demo's models, which are always registered."""
HUB_MODEL = re.compile(r"[\w-][\w.-]*/[\w.-]+")
Configured = TypeVar("Configured", bound=Settings)
_async_answers = ThreadPoolExecutor(1, "hdtool-llm")
"""Thread in which async models answer one prompt at a time."""


def _options() -> type[Any]:
    """Return the class of a model's options: those in ``OFFERED``, each None unless the user gives it."""
    limit = Field(None, ge=1, description=f"Maximum tokens in an answer. Default: {MAX_TOKENS}.")
    options: dict[str, Any] = {"max_tokens": (int | None, limit)}
    for kind, names in OFFERED.items():
        types = get_type_hints(kind)
        for one in fields(kind):
            if one.name in names:
                accepted = str if get_origin(types[one.name]) is tuple else types[one.name]
                options[one.name] = (
                    accepted | None,
                    Field(None, description=HELPS.get(one.name, one.metadata["help"])),
                )
    created: type[Any] = create_model("Options", __base__=llm.Options, **options)
    return created


def _settings(kind: type[Configured], options: Any, **more: Any) -> Configured:
    """Return settings with the values given in a prompt's options; ``more`` holds further values."""
    given = {name: value for name in OFFERED[kind] if (value := getattr(options, name)) is not None}
    if "stop" in given:
        given["stop"] = (given["stop"],)
    return kind(**given, **more)


class HdtoolModel(llm.Model):  # type: ignore[misc]  # llm is not installed for type checks
    """Model of ``llm`` that hdtool runs. It is loaded for the first prompt, and again if other options require it."""

    can_stream = True
    supports_schema = True
    Options = _options()

    def __init__(self, name: str, place: str) -> None:
        """``place`` is a folder, a hub name, a GGUF file, or a name of the demo's models."""
        self.model_id = PREFIX + name
        self._place = place
        self._answerer: Answerer | None = None
        self._loaded_with: tuple[Settings, ...] = ()
        """Settings with which ``_answerer`` was loaded."""

    def execute(self, prompt: Any, stream: bool, response: Any, conversation: object) -> Iterator[str]:
        """Yield the answer in pieces, then report its tokens, steps and drafts; errors become ``llm.ModelError``."""
        try:
            for answer in self._ready(prompt.options).all_answers([_conversation(prompt)]):
                yield from answer
                response.set_usage(
                    input=answer.prompt_tokens, output=answer.stats.tokens, details=_usage_details(answer.stats)
                )
                response.response_json = {"finish": answer.stats.finish}
        except HdtoolError as error:
            raise llm.ModelError(str(error)) from None

    def _ready(self, options: Any) -> Answerer:
        """Return the answerer for these options; load the model anew unless only sampling and length have changed."""
        from transformers.utils import logging

        from hdtool.runtime.answering.answer_prompts import Answerer

        logging.set_verbosity_error()
        sampling = _settings(SamplingConfig, options)
        model, decoding = _settings(ModelConfig, options, model=self._place), _settings(DecodeConfig, options)
        settings = model, decoding, (stores := _settings(StoresConfig, options))
        if self._answerer is None or self._loaded_with != settings:
            self._answerer = None  # frees the memory of the model before another one is loaded
            self._answerer, self._loaded_with = Answerer(model, decoding, sampling, stores=stores), settings
        self._answerer.sampling = sampling
        self._answerer.decoding = replace(decoding, max_new_tokens=options.max_tokens or MAX_TOKENS)
        return self._answerer


class AsyncHdtoolModel(llm.AsyncModel):  # type: ignore[misc]  # llm is not installed for type checks
    """Async model of ``llm`` that runs an ``HdtoolModel`` in a separate thread."""

    can_stream = True
    supports_schema = True
    Options = HdtoolModel.Options

    def __init__(self, model: HdtoolModel) -> None:
        self.model_id = model.model_id
        self._model = model

    async def execute(self, prompt: Any, stream: bool, response: Any, conversation: object) -> AsyncIterator[str]:
        """Yield the answer in pieces; if the caller stops early, the rest is not generated."""
        loop, pieces, left = asyncio.get_running_loop(), asyncio.Queue[str | None](), Event()

        def answer() -> None:
            try:
                for piece in self._model.execute(prompt, stream, response, None):
                    loop.call_soon_threadsafe(pieces.put_nowait, piece)
                    if left.is_set():
                        return
            finally:
                loop.call_soon_threadsafe(pieces.put_nowait, None)

        answered = loop.run_in_executor(_async_answers, answer)
        try:
            while (piece := await pieces.get()) is not None:
                yield piece
            await answered
        finally:
            left.set()


def _conversation(prompt: Any) -> Prompt:
    """Return the text of ``llm``'s prompt and of the conversation before it; raise PromptError if there is no text."""
    messages: list[Message] = [
        {"role": message.role, "content": text}
        for message in prompt.messages
        if (text := "".join(part.text for part in message.parts if isinstance(part, TextPart)))
    ]
    if not messages:
        raise PromptError("there is nothing to answer: give a prompt")
    return Prompt(tuple(messages), grammar=Grammar.json_schema(prompt.schema) if prompt.schema else None)


def _usage_details(stats: Stats) -> dict[str, Any]:
    """Return the usage details that ``llm`` shows besides token counts, leaving out zeros."""
    details: dict[str, Any] = {
        "tokens_per_step": round(stats.tokens_per_step, 2),
        "steps": stats.steps,
        "cached_tokens": stats.cached_tokens,
        "sources": {
            name: {"drafted": counts["drafted"], "accepted": counts["accepted"]}
            for name, counts in stats.sources_json().items()
            if counts["drafted"]
        },
    }
    return {name: value for name, value in details.items() if value}


_model = cache(HdtoolModel)  # `llm` registers all models again for each look-up, and a loaded one stays loaded


@llm.hookimpl
def register_models(register: Callable[..., None]) -> None:
    """Register the demo's models and those that the user added; warn if the file with the added models is damaged."""
    try:
        added = _added()
    except ModelError as error:
        _warn(str(error))
        added = {}
    for name, place in {**DEMO_MODELS, **added}.items():
        register(_model(name, place), AsyncHdtoolModel(_model(name, place)))


@cache  # `llm` registers all models several times
def _warn(message: str) -> None:
    click.echo(f"warning: {message}", err=True)


@llm.hookimpl
def register_commands(cli: click.Group) -> None:
    """Add ``llm hdtool add`` and ``llm hdtool remove``."""

    @cli.group()
    def hdtool() -> None:
        """Add models that hdtool runs, or remove them."""

    @hdtool.command()
    @click.argument("model")
    @click.option("--name", help="Name after hdtool/. Default: that of the folder, file or model.")
    @_errors_for_click()
    def add(model: str, name: str | None) -> None:
        """Add the MODEL in a folder, in a GGUF file or on the hub as hdtool/NAME."""
        path, default = Path(model).expanduser().resolve(), model
        if path.exists():
            model, default = str(path), path.name.removesuffix(".gguf")
        elif not HUB_MODEL.fullmatch(model):
            raise ModelError(f"{model} is no folder or file here, and no name on the hub, as in OWNER/NAME")
        name = (name or default).removeprefix(PREFIX)
        added = _added()
        if (taken := {**added, **DEMO_MODELS}.get(name, model)) != model:
            raise ModelError(f"{PREFIX}{name} is the name of {taken} already: choose another one with --name")
        _write({**added, name: model})
        click.echo(f"added {PREFIX}{name}")

    @hdtool.command()
    @click.argument("name")
    @_errors_for_click()
    def remove(name: str) -> None:
        """Remove the model hdtool/NAME from the list of llm; its files stay."""
        added = _added()
        if added.pop(name.removeprefix(PREFIX), None) is None:
            raise ModelError(f"no model {name} was added: llm models -q {PREFIX} lists them")
        _write(added)


@contextmanager
def _errors_for_click() -> Iterator[None]:
    try:
        yield
    except HdtoolError as error:
        raise click.ClickException(str(error)) from None


def _added() -> dict[str, str]:
    """Return the places of the models that the user added, by name; raise ModelError if their file is damaged."""
    file = _models_file()
    return json_object(file.path) if file.exists() else {}


def _write(added: Mapping[str, str]) -> None:
    _models_file().write(json.dumps(added, indent=2, ensure_ascii=False) + "\n")


def _models_file() -> OutputFile:
    content = "a JSON object with the places of models by their names"
    advice = "mend it, or delete it and add the models again"
    return OutputFile(llm.user_dir() / "hdtool-models.json", content, _holds_models, ModelError, advice)


def _holds_models(path: Path) -> bool:
    try:
        added = parse_json(decode_utf8(path.read_bytes()))
    except RowError:
        return False
    return isinstance(added, dict) and all(isinstance(place, str) for place in added.values())
