"""The class of all commands: ``--help`` in panels with examples, and the check for options without effect."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import typer
from typer.core import TyperCommand

from hdtool.cli.parameters.early_checks import refuse_model_option, require_stores
from hdtool.cli.parameters.unused_options import refuse_unused

INPUT, MODEL, DRAFTING, SAMPLING, OUTPUT = "Input", "Model", "Drafting", "Sampling", "Output"
STRUCTURE, SERVER = "Structured output", "Server"
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
    "Options",
)


class Command(TyperCommand):
    """A command of hdtool."""

    # typer's own panels need rich, which would double the time that a command takes to start.
    def format_options(self, ctx: Any, formatter: Any) -> None:
        panels: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            usual = "Arguments" if parameter.param_type_name == "argument" else "Options"
            if record := parameter.get_help_record(ctx):
                panels.setdefault(getattr(parameter, "rich_help_panel", None) or usual, []).append(record)
        for panel in sorted(panels, key=PANELS.index):
            with formatter.section(panel):
                formatter.write_dl(panels[panel])

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        if self.epilog:
            formatter.write(f"\nExamples:\n{self.epilog}\n")

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        refuse_model_option(ctx.command_path, self.get_params(ctx), args)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        typed = {name for name in ctx.params if getattr(ctx.get_parameter_source(name), "name", "") == "COMMANDLINE"}
        refuse_unused(typed, ctx.params)
        require_stores(ctx.params)
        return super().invoke(ctx)


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
