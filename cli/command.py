"""Command class with panels and examples in its help, and helpers for options and for line wrapping.

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
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand

from hdtool.data import demo
from hdtool.data.errors import OptionError
from hdtool.data.progress import show_bars
from hdtool.data.prompts import Prompt, read_tools
from hdtool.data.stores.home import NO_STORE
from hdtool.runtime.config import (
    LOWEST_TEMPERATURE,
    METHODS,
    OPTION_METHODS,
    PEERS,
    SHAPE_PEERS,
    GrammarConfig,
    ShapeConfig,
)

STORE_OPTIONS = ("model_db", "corpus_db")


def require_stores(parameters: Mapping[str, Any]) -> None:
    """Raise StoreError if ``--model-db`` or ``--corpus-db`` names a store that does not exist."""
    named = [value for name in STORE_OPTIONS if isinstance(value := parameters.get(name), str) and value != NO_STORE]
    if named:
        from hdtool.data.stores.home import store_folder
        from hdtool.data.stores.store import read_manifest

        for name in named:
            read_manifest(store_folder(name))


def with_structure(prompts: Sequence[Prompt], structure: GrammarConfig, tools: Path | None) -> list[Prompt]:
    """Add the grammar in ``structure`` to prompts without one, and the tools in ``tools`` to prompts without tools."""
    grammar, offered = structure.read(), read_tools(tools) if tools is not None else ()
    return [replace(one, grammar=one.grammar or grammar, tools=one.tools or offered) for one in prompts]


INPUT_PANEL, MODEL_PANEL, DRAFTING_PANEL, SAMPLING_PANEL, OUTPUT_PANEL = (
    "Input",
    "Model",
    "Drafting",
    "Sampling",
    "Output",
)
STRUCTURE_PANEL, SERVER_PANEL = "Structured output", "Server"
RARE_PANEL = "Rarely used"
BUILD_PANEL, HEADS_PANEL, TRAINING_PANEL, MEASUREMENT_PANEL = (
    "Build",
    "Architecture of the heads",
    "Training",
    "Measurement",
)
PANEL_ORDER = (
    "Arguments",
    INPUT_PANEL,
    SERVER_PANEL,
    MODEL_PANEL,
    HEADS_PANEL,
    TRAINING_PANEL,
    DRAFTING_PANEL,
    SAMPLING_PANEL,
    STRUCTURE_PANEL,
    BUILD_PANEL,
    MEASUREMENT_PANEL,
    OUTPUT_PANEL,
    RARE_PANEL,
    "Options",
)
SHORT_NAMES = {"--model": "-m", "--prompt": "-p", "--max-new-tokens": "-n", "--out": "-o", "--from": "-f"}
"""Short names of frequently used options."""
RARELY_USED = {
    "attn_implementation",
    "body_seconds",
    "device_map",
    "fused_layers",
    "generation_config",
    "heads",
    "history_prompts",
    "lookahead",
    "max_body_mib",
    "max_waiting",
    "order",
    "prefix_cache_mib",
    "prefix_caching",
    "repetition_penalty",
    "revision",
    "shutdown_seconds",
    "sources",
    "tree",
}
"""Options that only ``--help-all`` shows if a command has more than ``MAX_SHORT_LIST`` parameters."""
MAX_SHORT_LIST = 25
"""Number of parameters up to which ``--help`` lists all of them."""
HELP_ALL = "help_all"
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
        return restore_hyphens(super().get_help(ctx))

    # typer's panels need rich, which would double the start-up time of a command.
    def format_options(self, ctx: Any, formatter: Any) -> None:
        parameters = self.get_params(ctx)
        rare = rarely_used(one.name for one in parameters)
        shows_all = HELP_ALL in ctx.meta
        panels: dict[str, list[tuple[str, str]]] = {}
        for parameter in parameters:
            usual = "Arguments" if parameter.param_type_name == "argument" else "Options"
            panel = RARE_PANEL if parameter.name in rare else getattr(parameter, "rich_help_panel", None) or usual
            record = parameter.get_help_record(ctx)
            if record and (shows_all or panel != RARE_PANEL):
                panels.setdefault(panel, []).append((record[0], protect_hyphens(record[1])))
        for panel in sorted(panels, key=PANEL_ORDER.index):
            with formatter.section(panel):
                formatter.write_dl(panels[panel])
        if shows_all and has_methods(one.name for one in parameters):
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
        typed = {name for name in ctx.params if getattr(ctx.get_parameter_source(name), "name", "") == "COMMANDLINE"}
        refuse_unused(typed, ctx.params)
        require_stores(ctx.params)
        return super().invoke(ctx)


def protect_hyphens(text: str) -> str:
    """Replace hyphens with non-breaking ones, so that no line breaks at them; ``restore_hyphens`` undoes this."""
    return text.replace("-", NON_BREAKING_HYPHEN)


def restore_hyphens(text: str) -> str:
    return text.replace(NON_BREAKING_HYPHEN, "-")


def rarely_used(names: Iterable[str | None]) -> set[str]:
    """Return the names of a command's options that its ``--help`` leaves out."""
    given = {name for name in names if name} - {"help", HELP_ALL}
    return given & RARELY_USED if len(given) > MAX_SHORT_LIST else set()


def has_methods(names: Iterable[str | None]) -> bool:
    """Return True if a command has an option ``--method`` or ``--methods``."""
    return not {"method", "methods"}.isdisjoint(names)


def _show_all(ctx: typer.Context, requested: bool) -> None:
    if requested:
        ctx.meta[HELP_ALL] = True
        typer.echo(ctx.get_help())
        raise typer.Exit


def help_all(names: Collection[str]) -> list[inspect.Parameter]:
    """Return a list with the parameter ``--help-all``, or an empty list if ``--help`` already shows everything."""
    left_out = (["all options"] if rarely_used(names) else []) + (["the methods"] if has_methods(names) else [])
    if not left_out:
        return []
    help = f"Show {' and '.join(left_out)}, and exit."
    shown = Annotated[bool, option("Options", help, "--help-all", callback=_show_all, is_eager=True)]
    return [inspect.Parameter(HELP_ALL, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=shown)]


def option(panel: str, help: str, *names: str, values: Iterable[str] = (), **settings: Any) -> Any:
    """Return a typer option that ``--help`` shows in ``panel``.

    ``values`` are offered for completion, also within a comma-separated list.
    """
    complete = completion(tuple(values)) if values else None
    return typer.Option(*names, help=help, rich_help_panel=panel, autocompletion=complete, **settings)


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


class Conflict(NamedTuple):
    """Options that have no effect if other options have certain values."""

    options: tuple[str, ...]
    deciding_options: tuple[str, ...]
    """Options whose values cause the conflict, which does not apply to commands that lack any of these options."""
    values: tuple[object, ...]
    """Values of ``deciding_options`` with which the options have no effect. Empty means any value but None."""
    reason: str


AMPHISTA_OPTIONS = ("auto_embedding", "positions", "adaptation", "sampled_token")
DRAFTING_OPTIONS = (
    *("method", "draft_tokens", "sources", "order", "lookahead", "prefix_caching"),
    *("heads", "drafter", "history_prompts", "tree"),
)
"""Drafting options of ``export`` that have an effect only if a folder is exported."""
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
    """Raise OptionError if an option in ``typed`` has no effect.

    An option that the selected methods ignore is allowed if its value is ``none``.
    """
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
        values = [settings[name] for name in conflict.deciding_options if name in settings]
        holds = all(value in conflict.values if conflict.values else value is not None for value in values)
        if holds and len(values) == len(conflict.deciding_options):
            for option in conflict.options:
                if option in typed:
                    _no_effect_error(option, conflict.reason)


def _selected_methods(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the methods that will run, or an empty tuple if the settings select none."""
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
    """Return the parameter that takes the model as a positional argument."""
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

    If there are two arguments, the first is the model. A single argument is the prompt, unless an option gives the
    prompt and no option gives the model.
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
