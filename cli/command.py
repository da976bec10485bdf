"""The command class, with help panels and examples, and helpers for options and for wrapped output."""

from __future__ import annotations

import inspect
import os
import re
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from logging import getLogger
from pathlib import Path
from typing import Annotated, Any, TextIO, cast

import typer
from typer.core import TyperCommand

from hdtool.cli.model_argument import refuse_unused, take_model
from hdtool.data.progress import show_bars
from hdtool.data.prompts import Prompt, read_tools
from hdtool.data.stores.home import NO_STORE
from hdtool.runtime.config import METHODS, GrammarConfig

COLOR_CODE = re.compile("\033\\[[0-9;]*m")
CONTROL_CHARACTERS = re.compile("[\\x00-\\x08\\x0b-\\x1f]")
"""Control characters that move the cursor, as progress bars do. Line breaks and tabs are not among them."""
ERASE_LINE = "\r\033[K"
"""Sequence that clears the current line, so that a message replaces a progress bar, which is drawn again below."""
CONTINUATION_INDENT = "  "
"""Additional indent of the lines into which a long line is broken."""


def wrap_text(text: str, width: int, indent: str = CONTINUATION_INDENT) -> str:
    """Break long lines between words. A word longer than ``width``, such as a path, stays whole.

    Text with control characters is returned unchanged.
    """
    if len(text) <= width or CONTROL_CHARACTERS.search(COLOR_CODE.sub("", text)):
        return text
    return "\n".join(_wrap_line(line, width, indent) for line in text.split("\n"))


def wrap_for_terminal(text: str, indent: str = CONTINUATION_INDENT) -> str:
    """Break long lines if standard output is a terminal, else return the text unchanged."""
    return wrap_text(text, width, indent) if (width := _terminal_width(sys.stdout)) else text


def wrap_standard_error() -> None:
    """Break long lines in everything that this process prints to standard error, if that is a terminal."""
    if _terminal_width(sys.stderr) and not isinstance(cast(Any, sys.stderr), _WrappedStream):
        sys.stderr = cast(TextIO, _WrappedStream(sys.stderr))


class _WrappedStream:
    """Stream that breaks long lines and erases a progress bar before it prints a message."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_on_bar = False
        """True if the current line holds a progress bar."""

    def write(self, text: str) -> int:
        erased = ERASE_LINE if self._is_on_bar and not text.startswith(("\r", "\n")) else ""
        if text:
            self._is_on_bar = text.startswith("\r") and not text.endswith("\n")
        return self._stream.write(
            erased + (wrap_text(text, width) if (width := _terminal_width(self._stream)) else text)
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _wrap_line(line: str, width: int, indent: str) -> str:
    if _visible_length(line) <= width:
        return line
    words = re.findall("[ \t]*[^ \t]+", line)
    margin = indent + line[: len(line) - len(line.lstrip())]
    lines = words[:1]
    for word in words[1:]:
        if _visible_length(lines[-1] + word) <= width:
            lines[-1] += word
        else:
            lines.append(margin + word.lstrip())
    return "\n".join(lines)


def _visible_length(text: str) -> int:
    """Return the number of columns of a text, without colour codes."""
    return len(COLOR_CODE.sub("", text))


def _terminal_width(stream: TextIO) -> int:
    """Return the width of a terminal in columns, or 0 if the stream is not a terminal."""
    try:
        return os.get_terminal_size(stream.fileno()).columns if stream.isatty() else 0
    except (OSError, ValueError):
        return 0


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
    """Add the grammar and the tools of the options to prompts that have none."""
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
"""Short names of frequent options."""
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
"""Options that ``--help`` leaves out if a command has many. ``--help-all`` shows them."""
MAX_SHORT_LIST = 25
"""Number of parameters up to which ``--help`` lists all of them."""
HELP_ALL = "help_all"
NON_BREAKING_HYPHEN = "\N{NON-BREAKING HYPHEN}"


class Command(TyperCommand):
    """Command with short option names, panels and examples in its help, and checks of its options."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.help = protect_hyphens(self.help or "")
        if not self.context_settings.get("ignore_unknown_options"):  # -m and the others may be options of vLLM
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
    """Replace hyphens by non-breaking ones, so that lines are not broken there. ``restore_hyphens`` undoes it."""
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


def _show_all(ctx: typer.Context, wanted: bool) -> None:
    if wanted:
        ctx.meta[HELP_ALL] = True
        typer.echo(ctx.get_help())
        raise typer.Exit


def help_all(names: Collection[str]) -> list[inspect.Parameter]:
    """Return the parameter ``--help-all`` in a list, which is empty if ``--help`` already shows everything."""
    left_out = (["all options"] if rarely_used(names) else []) + (["the methods"] if has_methods(names) else [])
    if not left_out:
        return []
    help = f"Show {' and '.join(left_out)}, and exit."
    shown = Annotated[bool, option("Options", help, "--help-all", callback=_show_all, is_eager=True)]
    return [inspect.Parameter(HELP_ALL, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=shown)]


def option(panel: str, help: str, *names: str, values: Iterable[str] = (), **settings: Any) -> Any:
    """Return a typer option in a panel of the help.

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
    """Silence progress bars and warnings of libraries and, with ``quiet``, hdtool's progress bars."""
    from huggingface_hub.utils import logging as hub_logging
    from transformers.utils import logging

    show_bars(not quiet)
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    hub_logging.set_verbosity_error()
    logging.disable_progress_bar()
    for library in ("bitsandbytes", "torchao", "torch.utils._pytree"):
        getLogger(library).setLevel("ERROR")
