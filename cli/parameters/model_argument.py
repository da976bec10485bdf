"""The model of a command, as its first argument or as ``--model``."""

from __future__ import annotations

import inspect
import re
from collections.abc import MutableMapping
from pathlib import Path
from typing import Annotated, Any

import typer

from hdtool.data.demo import EMBEDDED, SMOLLM2
from hdtool.data.errors import OptionError

MODEL_ARGUMENT = "model_argument"
STANDARD_INPUT = "-"
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
"""A word of this form may be a prompt, such as and/or; --prompt says so."""


def model_argument() -> inspect.Parameter:
    """The parameter of a command that takes its model as an argument."""
    argument = typer.Argument(metavar="MODEL", help="The model, which --model names as well.")
    return inspect.Parameter(
        MODEL_ARGUMENT, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[str | None, argument]
    )


def require_model(command: str, model: str | None) -> None:
    if model is None:
        raise OptionError(f"hdtool {command} needs a model: hdtool {command} MODEL")


def take_model(command: str, given: MutableMapping[str, Any]) -> None:
    """Move the first argument to the parameter that it is meant for: the model, or what comes after it."""
    first = given.get(MODEL_ARGUMENT)
    if first is None:
        return
    given[MODEL_ARGUMENT] = None
    if "text" in given:
        _take_model_or_prompt(command, first, given)
    elif "more_logs" in given and given["model"] not in (None, first):
        given["more_logs"] = [first, *(given["more_logs"] or ())]
    else:
        _set_model(first, given)


def _take_model_or_prompt(command: str, first: str, given: MutableMapping[str, Any]) -> None:
    """Two arguments are model and prompt. One is the prompt, unless an option gives the prompt and none the model."""
    has_prompt = given["prompt"] is not None or given["prompts"] is not None
    if given["text"] is not None or (has_prompt and given["model"] is None and first != STANDARD_INPUT):
        _set_model(first, given)
    elif given["model"] is None and _names_model(first):
        raise OptionError(
            f"{first} is a model and there is no prompt: {command} {first} PROMPT, or hdtool chat {first}; "
            f"{command} {first} - reads standard input, and --prompt {first} answers that text"
        )
    else:
        given["text"] = first


def _set_model(first: str, given: MutableMapping[str, Any]) -> None:
    if given["model"] not in (None, first):
        raise OptionError(
            f"two models are named, {first} as an argument and {given['model']} by --model: leave one out"
            + (" (a prompt of several words needs quotes)" if "text" in given else "")
        )
    given["model"] = first


def _names_model(word: str) -> bool:
    """Whether a word is evidently a model, and not a prompt."""
    if word in (SMOLLM2, EMBEDDED) or HUB_NAME.fullmatch(word):
        return True
    try:
        path = Path(word).expanduser()
        return path.is_file() if path.suffix.lower() == ".gguf" else (path / "config.json").is_file()
    except (OSError, RuntimeError, ValueError):  # texts that are no path
        return False
