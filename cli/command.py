"""Command class with panels and examples in its help, and the checks of options and of the model argument.

A command accepts the model as its first argument or by ``--model``, and rejects options that have no effect.
"""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import replace
from logging import getLogger
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from typer.core import TyperCommand
from typer.models import OptionInfo

from hdtool.data import demo
from hdtool.data.errors import OptionError
from hdtool.data.progress import show_bars
from hdtool.data.prompts import Prompt, read_tools
from hdtool.data.stores.stores_at_home import NO_STORE
from hdtool.runtime.settings.decoding import METHODS, GrammarConfig
from hdtool.runtime.settings.measuring import PEERS, SHAPE_PEERS, ShapeConfig
from hdtool.runtime.settings.settings_base import ANY_USE, Panel, Use

STORE_OPTIONS = ("model_db", "corpus_db")


def require_stores(parameters: Mapping[str, Any]) -> None:
    """Raise StoreError if ``--model-db`` or ``--corpus-db`` names a store that is missing or cannot be opened."""
    named = [value for name in STORE_OPTIONS if isinstance(value := parameters.get(name), str) and value != NO_STORE]
    if named:
        from hdtool.data.stores.store_folder import read_manifest
        from hdtool.data.stores.stores_at_home import store_folder

        for name in named:
            read_manifest(store_folder(name))


def with_structure(prompts: Sequence[Prompt], structure: GrammarConfig, tools: Path | None) -> list[Prompt]:
    """Add the grammar of ``structure`` to prompts without one, and the tools in the file ``tools`` to those without."""
    grammar, offered = structure.read(), read_tools(tools) if tools is not None else ()
    return [replace(one, grammar=one.grammar or grammar, tools=one.tools or offered) for one in prompts]


SHORT_NAMES = {"--model": "-m", "--prompt": "-p", "--max-new-tokens": "-n", "--out": "-o", "--from": "-f"}
"""Short names of frequently used options."""
SCREEN_LINES = 45
"""Number of lines above which ``--help`` leaves out rare options and shortens the help of others."""
HELP_ALL, SHORTENED = "help_all", "shortened"
"""Name of the parameter ``--help-all``, and key that marks a context whose help leaves out rare options."""
SECOND_NAME = re.compile(r"(?<=\w\w), --[\w-]+")
NON_BREAKING_HYPHEN = "\N{NON-BREAKING HYPHEN}"


class Command(TyperCommand):
    """Command that adds short option names, shows panels and examples in its help, and checks its options."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.help = protect_hyphens(self.help or "")
        if not self.context_settings.get("ignore_unknown_options"):  # the short names may be options of vLLM
            for parameter in self.params:
                parameter.opts[:0] = [SHORT_NAMES[name] for name in parameter.opts if name in SHORT_NAMES]

    def get_help(self, ctx: Any) -> str:
        shown = super().get_help(ctx)
        if HELP_ALL not in ctx.meta and len(shown.splitlines()) > SCREEN_LINES:
            ctx.meta[SHORTENED] = True
            shown = super().get_help(ctx)
        return restore_hyphens(shown)

    # typer's panels need rich, which would double the start-up time of a command.
    def format_options(self, ctx: Any, formatter: Any) -> None:
        shortened = SHORTENED in ctx.meta
        panels: dict[str, list[tuple[str, str]]] = {panel: [] for panel in Panel}
        for parameter in self.get_params(ctx):
            usual = Panel.ARGUMENTS if parameter.param_type_name == "argument" else Panel.OPTIONS
            panel = getattr(parameter, "rich_help_panel", None) or usual
            record = parameter.get_help_record(ctx)
            if record and not (shortened and use_of(self, parameter.name).rare):
                panels[panel].append(record)
        for panel, rows in panels.items():
            if rows:
                with formatter.section(panel):
                    shown = _shortened(rows, formatter.width) if shortened else rows
                    formatter.write_dl([(name, protect_hyphens(help)) for name, help in shown])
        if not shortened and not {"method", "methods"}.isdisjoint(one.name for one in self.params):
            with formatter.section("Methods"):
                formatter.write_dl([(name, protect_hyphens(method.description)) for name, method in METHODS.items()])

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        if self.epilog:
            formatter.write(f"\nExamples:\n{self.epilog}\n")

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        rest = super().parse_args(ctx, args)
        if not ctx.resilient_parsing:
            take_model(ctx.command_path, ctx.params)
        return rest

    def invoke(self, ctx: Any) -> Any:
        for name in ctx.params:
            if getattr(ctx.get_parameter_source(name), "name", "") == "COMMANDLINE":
                refuse_without_effect(name, use_of(self, name), ctx.params)
        require_stores(ctx.params)
        return super().invoke(ctx)


def _shortened(rows: Sequence[tuple[str, str]], width: int) -> list[tuple[str, str]]:
    """Shorten ``(names, help)`` rows: keep one long name, the first sentence and, if the line has room, the default."""
    names = [SECOND_NAME.sub("", name) for name, _ in rows]
    room = width - max(map(len, names)) - 2 * len("  ")
    shortened = []
    for name, (_, help) in zip(names, rows, strict=True):
        text, gap, default = help.partition("  [")
        sentence = text.split(". ")[0].rstrip(".") + "."
        line = sentence + gap + default
        shortened.append((name, line if len(line) <= room else sentence))
    return shortened


def protect_hyphens(text: str) -> str:
    """Replace hyphens with non-breaking ones, so that no line breaks at them; ``restore_hyphens`` undoes this."""
    return text.replace("-", NON_BREAKING_HYPHEN)


def restore_hyphens(text: str) -> str:
    return text.replace(NON_BREAKING_HYPHEN, "-")


def _show_all(ctx: typer.Context, requested: bool) -> None:
    if requested:
        ctx.meta[HELP_ALL] = True
        typer.echo(ctx.get_help())
        raise typer.Exit


def help_all() -> inspect.Parameter:
    """Return the parameter ``--help-all``."""
    help = "Show all options with their whole help, and exit."
    shown = Annotated[bool, Option(Panel.OPTIONS, help, "--help-all", callback=_show_all, is_eager=True)]
    return inspect.Parameter(HELP_ALL, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=shown)


class Option(OptionInfo):
    """Typer option with a panel in ``--help`` and the ``Use`` that says when the option has an effect.

    ``values`` are offered for completion, also within a comma-separated list.
    """

    def __init__(
        self, panel: Panel, help: str, *names: str, values: Iterable[str] = (), use: Use = ANY_USE, **settings: Any
    ) -> None:
        super().__init__(
            default=...,
            param_decls=names,
            help=help,
            rich_help_panel=panel,
            autocompletion=completion(tuple(values)) if values else None,
            **settings,
        )
        self.use = use


def use_of(command: TyperCommand, name: str) -> Use:
    """Return the ``Use`` that a command's option declares, or ``ANY_USE`` if it declares none."""
    parameter = inspect.signature(command.callback).parameters.get(name) if command.callback else None
    shown = get_args(parameter.annotation)[-1] if parameter else None
    return shown.use if isinstance(shown, Option) else ANY_USE


def completion(values: tuple[str, ...]) -> Callable[[str], list[str]]:
    """Return a function that completes the last item of a comma-separated list."""

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        return [before + comma + value for value in values if value.startswith(last)]

    return complete


def quiet_libraries(*, quiet: bool = False) -> None:
    """Silence the progress bars and warnings of libraries and, if ``quiet`` is True, hdtool's own progress bars."""
    from huggingface_hub.utils import logging as hub_logging
    from transformers.utils import logging

    show_bars(not quiet)
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    hub_logging.set_verbosity_error()
    logging.disable_progress_bar()
    for library in ("bitsandbytes", "torchao", "torch.utils._pytree"):
        getLogger(library).setLevel("ERROR")


def refuse_without_effect(name: str, use: Use, given: Mapping[str, Any]) -> None:
    """Raise OptionError if an option has no effect with the other values in ``given``.

    An option that the selected methods ignore is allowed if its value is ``none``.
    """
    methods, reason = _selected_methods(given), use.no_effect(given)
    if use.methods and methods and given[name] != "none" and not set(methods) & set(use.methods):
        reason = f"with method {', '.join(methods)} (it belongs to {', '.join(use.methods)})"
    if reason:
        reason, _, advice = str(reason).partition(": ")
        raise OptionError(f"--{name.replace('_', '-')} has no effect {reason}: {advice or 'leave it out'}")


def _selected_methods(given: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the methods that will run; an empty tuple if none is selected or a selected one does not exist."""
    listed = [given["method"]] if "method" in given else given.get("methods")
    methods = method_names(listed) or (ShapeConfig.methods if {"shape", "methods"} <= {*given} else ())
    return methods if {*methods} <= {*METHODS, *PEERS, *SHAPE_PEERS} else ()


def method_names(listed: Collection[str] | None) -> tuple[str, ...] | None:
    """Split the values of a repeatable option at their commas; return None if the option was not given."""
    return tuple(name.strip() for names in listed for name in names.split(",")) if listed else None


MODEL_ARGUMENT = "model_argument"
STANDARD_INPUT = "-"
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
"""Form of a model's name on the hub. A prompt of this form, such as ``and/or``, needs ``--prompt``."""


def model_argument() -> inspect.Parameter:
    """Return the parameter that takes the model as a positional argument."""
    argument = typer.Argument(
        metavar="MODEL", help="The model, which --model names as well.", rich_help_panel=Panel.MODEL
    )
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

    If there are two arguments, the first is the model. A single argument is the prompt, unless an option gives the
    prompt and no option gives the model. Raise OptionError if it names a model and there is no prompt.
    """
    has_prompt = given["prompt"] is not None or given["prompts"] is not None
    if given["text"] is not None or (has_prompt and given["model"] is None and first != STANDARD_INPUT):
        _set_model(first, given)
    elif given["model"] is None and names_model(first):
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


def names_model(word: str) -> bool:
    """Return True if a word is clearly the name or the path of a model, and not a prompt."""
    if word in demo.NAMES or HUB_NAME.fullmatch(word):
        return True
    try:
        path = Path(word).expanduser()
        return path.is_file() if path.suffix.lower() == ".gguf" else (path / "config.json").is_file()
    except (OSError, RuntimeError, ValueError):  # the text is not a valid path
        return False
