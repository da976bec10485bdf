"""Accept the model as first argument or by ``--model``, and reject options that have no effect."""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Mapping, MutableMapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from hdtool.data.demo import EMBEDDED, SMOLLM2
from hdtool.data.errors import OptionError
from hdtool.runtime.config import LOWEST_TEMPERATURE, METHODS, OPTION_METHODS, PEERS, SHAPE_PEERS, ShapeConfig


class Conflict(NamedTuple):
    """Options that have no effect if other options have certain values."""

    options: tuple[str, ...]
    others: tuple[str, ...]
    """Parameters whose values decide. Commands that lack one of them have no conflict."""
    values: tuple[object, ...]
    """Values of ``others`` with which the options have no effect. Empty means any value but None."""
    reason: str


AMPHISTA_OPTIONS = ("auto_embedding", "positions", "adaptation", "sampled_token")
DRAFTING_OPTIONS = (
    *("method", "draft_tokens", "sources", "order", "lookahead", "prefix_caching"),
    *("heads", "drafter", "history_prompts", "tree"),
)
"""Drafting options, which only an exported folder uses."""
CONFLICTS = (
    Conflict(("prediction",), ("draft_tokens",), (0,), "with --draft-tokens 0"),
    Conflict(("color",), ("as_json",), (True,), "with --json"),
    Conflict(("history_prompts",), ("history",), ("none",), "with --history none"),
    Conflict(("namespace",), ("out",), (), "with --out, which names the folder"),
    Conflict(("model", "gguf_file", "trust_remote_code"), ("after", "ngrams"), (None,), "without --after or --ngrams"),
    Conflict(("medusa",), ("kind",), ("hydra", "hydra++", "mtp"), "with another --kind"),
    Conflict(
        (*AMPHISTA_OPTIONS, "mlp", "head_layers"),
        ("medusa",),
        (True,),
        "with --medusa, whose heads have none of these parts",
    ),
    *(
        Conflict(parts, ("kind",), (kind,), f"with --kind {kind}, which does not choose this part")
        for kind, parts in {
            "amphista": ("head_layers",),
            "medusa": (*AMPHISTA_OPTIONS, "mlp", "head_layers"),
            "hydra": (*AMPHISTA_OPTIONS, "mlp"),
            "hydra++": AMPHISTA_OPTIONS,
            "mtp": (*AMPHISTA_OPTIONS, "lm_head_rank", "head_layers"),
        }.items()
    ),
    Conflict(("temperatures",), ("report",), (None,), "without --report"),
    Conflict(("address",), ("engine",), ("local",), "without --engine ray"),
    Conflict(DRAFTING_OPTIONS, ("to",), ("sglang",), "with --to sglang, which writes what stores hold"),
)


def refuse_unused(typed: Collection[str], settings: Mapping[str, Any]) -> None:
    """Raise OptionError for the first typed option that has no effect, except where its value is ``none``."""
    methods = _selected_methods(settings)
    known = all(method in METHODS or method in PEERS or method in SHAPE_PEERS for method in methods)
    for option, users in OPTION_METHODS.items():
        if option in typed and settings[option] != "none" and methods and known and not set(methods) & set(users):
            _no_effect_error(option, f"with method {', '.join(methods)} (it belongs to {', '.join(users)})")
    if "temperature" in settings and settings["temperature"] < LOWEST_TEMPERATURE and not settings.get("temperatures"):
        for option in ("top_k", "top_p"):
            if option in typed:
                _no_effect_error(option, "with greedy decoding", "set --temperature above 0 or leave it out")
    for conflict in CONFLICTS:
        values = [settings[name] for name in conflict.others if name in settings]
        holds = all(value in conflict.values if conflict.values else value is not None for value in values)
        if holds and len(values) == len(conflict.others):
            for option in conflict.options:
                if option in typed:
                    _no_effect_error(option, conflict.reason)


def _selected_methods(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the methods that will run, or an empty tuple if any of them may."""
    if "method" in settings:
        return (settings["method"],)
    if listed := settings.get("methods"):
        return method_names(listed) or ()
    return ShapeConfig.methods if "shape" in settings and "methods" in settings else ()


def method_names(listed: Collection[str] | None) -> tuple[str, ...] | None:
    """Split the values of a repeatable option at their commas. Returns None if the option was not given."""
    return tuple(name.strip() for names in listed for name in names.split(",")) if listed else None


def _no_effect_error(option: str, reason: str, advice: str = "leave it out") -> None:
    raise OptionError(f"--{option.replace('_', '-')} has no effect {reason}: {advice}")


MODEL_ARGUMENT = "model_argument"
STANDARD_INPUT = "-"
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
"""Form of a model's name on the hub. A prompt of this form, such as and/or, needs ``--prompt``."""


def model_argument() -> inspect.Parameter:
    """Return the parameter for a model that is given as an argument."""
    argument = typer.Argument(metavar="MODEL", help="The model, which --model names as well.")
    return inspect.Parameter(
        MODEL_ARGUMENT, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[str | None, argument]
    )


def require_model(command: str, model: str | None) -> None:
    if model is None:
        raise OptionError(f"hdtool {command} needs a model: hdtool {command} MODEL")


def take_model(command: str, given: MutableMapping[str, Any]) -> None:
    """Assign the first argument to the parameter that it is meant for: the model, the prompt, or the logs."""
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
    """Decide whether the first argument is the model or the prompt.

    Of two arguments, the first is the model. A single argument is the prompt, unless an option gives the prompt and no
    option gives the model.
    """
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
    """Return True if a word is clearly the name or the path of a model, and not a prompt."""
    if word in (SMOLLM2, EMBEDDED) or HUB_NAME.fullmatch(word):
        return True
    try:
        path = Path(word).expanduser()
        return path.is_file() if path.suffix.lower() == ".gguf" else (path / "config.json").is_file()
    except (OSError, RuntimeError, ValueError):  # the text is not a valid path
        return False
