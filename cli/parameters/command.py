"""The class of all commands: ``--help`` in panels with examples, and the check for options without effect."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from hdtool.cli.parameters.early_checks import require_stores
from hdtool.cli.parameters.model_argument import take_model
from hdtool.cli.parameters.unused_options import refuse_unused
from hdtool.runtime.config import METHODS

INPUT, MODEL, DRAFTING, SAMPLING, OUTPUT = "Input", "Model", "Drafting", "Sampling", "Output"
STRUCTURE, SERVER = "Structured output", "Server"
RARE = "Rarely used"
BUILD, HEADS, TRAINING, MEASUREMENT = "Build", "Architecture of the heads", "Training", "Measurement"
PANELS = (
    "Arguments",
    INPUT,
    SERVER,
    MODEL,
    HEADS,
    TRAINING,
    DRAFTING,
    SAMPLING,
    STRUCTURE,
    BUILD,
    MEASUREMENT,
    OUTPUT,
    RARE,
    "Options",
)
SHORT = {"--model": "-m", "--prompt": "-p", "--max-new-tokens": "-n", "--out": "-o", "--from": "-f"}
"""Short names of the options that are typed most."""
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
"""Options that ``--help`` leaves out of long lists; ``--help-all`` shows them."""
LONG_LIST = 25
"""Most parameters that ``--help`` shows without leaving any out."""
HELP_ALL = "help_all"
NON_BREAKING_HYPHEN = "\N{NON-BREAKING HYPHEN}"


class Command(TyperCommand):
    """A command of hdtool."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.help = unbroken(self.help or "")
        if not self.context_settings.get("ignore_unknown_options"):  # they may be short options of another program
            for parameter in self.params:
                parameter.opts[:0] = [SHORT[name] for name in parameter.opts if name in SHORT]

    def get_help(self, ctx: Any) -> str:
        return with_hyphens(super().get_help(ctx))

    # typer's own panels need rich, which would double the time that a command takes to start.
    def format_options(self, ctx: Any, formatter: Any) -> None:
        parameters = self.get_params(ctx)
        rare = rarely_used(one.name for one in parameters)
        shows_all = HELP_ALL in ctx.meta
        panels: dict[str, list[tuple[str, str]]] = {}
        for parameter in parameters:
            usual = "Arguments" if parameter.param_type_name == "argument" else "Options"
            panel = RARE if parameter.name in rare else getattr(parameter, "rich_help_panel", None) or usual
            record = parameter.get_help_record(ctx)
            if record and (shows_all or panel != RARE):
                panels.setdefault(panel, []).append((record[0], unbroken(record[1])))
        for panel in sorted(panels, key=PANELS.index):
            with formatter.section(panel):
                formatter.write_dl(panels[panel])
        if shows_all and has_methods(one.name for one in parameters):
            with formatter.section("Methods"):
                formatter.write_dl([(name, unbroken(method.description)) for name, method in METHODS.items()])

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


def unbroken(text: str) -> str:
    """A text whose lines are not broken at its hyphens; ``with_hyphens`` restores them."""
    return text.replace("-", NON_BREAKING_HYPHEN)


def with_hyphens(text: str) -> str:
    return text.replace(NON_BREAKING_HYPHEN, "-")


def rarely_used(names: Iterable[str | None]) -> set[str]:
    """The options of a command that its ``--help`` leaves out."""
    given = {name for name in names if name} - {"help", HELP_ALL}
    return given & RARELY_USED if len(given) > LONG_LIST else set()


def has_methods(names: Iterable[str | None]) -> bool:
    """Whether a command takes drafting methods."""
    return not {"method", "methods"}.isdisjoint(names)


def _show_all(ctx: typer.Context, wanted: bool) -> None:
    if wanted:
        ctx.meta[HELP_ALL] = True
        typer.echo(ctx.get_help())
        raise typer.Exit


def help_all(names: Collection[str]) -> list[inspect.Parameter]:
    """The parameter of ``--help-all``, for a command whose ``--help`` leaves something out."""
    left_out = (["all options"] if rarely_used(names) else []) + (["the methods"] if has_methods(names) else [])
    if not left_out:
        return []
    help = f"Show {' and '.join(left_out)}, and exit."
    shown = Annotated[bool, option("Options", help, "--help-all", callback=_show_all, is_eager=True)]
    return [inspect.Parameter(HELP_ALL, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=shown)]


def option(panel: str, help: str, *names: str, values: Iterable[str] = (), **settings: Any) -> Any:
    """An option in a panel of the help; ``values`` are completed, also in a list with commas."""
    complete = completion(tuple(values)) if values else None
    return typer.Option(*names, help=help, rich_help_panel=panel, autocompletion=complete, **settings)


def completion(values: tuple[str, ...]) -> Callable[[str], list[str]]:
    """A function that completes the last of several values with commas between them."""

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        return [before + comma + value for value in values if value.startswith(last)]

    return complete
