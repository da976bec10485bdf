"""``hdtool serve --engine vllm``: vLLM's server, drafting from the stores that fit its model."""

from __future__ import annotations

import shlex
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated

import typer

from hdtool.cli.parameters.command import MODEL, OUTPUT, option
from hdtool.cli.serving.command import VLLM, Engine
from hdtool.data.errors import OptionError, ServeError
from hdtool.data.extras import install_command
from hdtool.runtime.config import StoresConfig, VllmConfig

if TYPE_CHECKING:
    from hdtool.runtime.integrations.vllm.launch import Launch

PASSED_ON = {"ignore_unknown_options": True}
"""For typer: unknown options are passed to vLLM."""


def serve_vllm(
    *,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL [VLLM OPTIONS]",
            help="Folder or hub name of the model, then any option of vllm serve. Default: the embedded demo model.",
        ),
    ] = None,
    model: Annotated[str | None, option(MODEL, "The model, if it is not the first argument.", "--model")] = None,
    engine: Engine = VLLM,
    serving: VllmConfig,
    stores: StoresConfig,
    dry_run: Annotated[bool, option(OUTPUT, "Print the command without running it.", "--dry-run")] = False,
) -> None:
    """Serve a model with vLLM and drafting.

    Starts vLLM's OpenAI-compatible server with the stores that fit the model's tokenizer, and prints the command. All
    options that are not listed here are passed to vLLM. Needs the extra vllm, pip install ".[vllm]".
    """
    if model is None:
        model, *passed_on = arguments or [""]
    else:
        passed_on = arguments or []
    if model.startswith("-"):
        raise OptionError(
            f"{model.partition('=')[0]} is in the place of the model: write hdtool serve MODEL --engine vllm "
            "[VLLM OPTIONS]"
        )
    if not dry_run and not find_spec("vllm"):
        raise ServeError(
            f"vLLM is not installed here: {install_command('vllm')}, or have the command printed for another place by "
            "--dry-run"
        )

    from hdtool.cli.output.show_answers import print_sources, quiet_libraries
    from hdtool.data import demo
    from hdtool.runtime.integrations.vllm.launch import Launch

    quiet_libraries()
    launch = Launch(model or str(demo.MODEL), passed_on, serving, stores)
    print_sources(launch.store_set)
    if not dry_run and (folder := launch.open_history()):
        print(f"keeping answers in {folder}", file=sys.stderr)
    _show(launch, dry_run=dry_run)
    if not dry_run:
        launch.run()


def _show(launch: Launch, *, dry_run: bool) -> None:
    """Print the command, the server's address and a warning if it is reachable from outside."""
    command, left_out = launch.printable
    print(shlex.join(command), file=sys.stdout if dry_run else sys.stderr, flush=True)
    if left_out:
        advice = ": set them where the command runs" if dry_run else ""
        print(
            f"note: the printed command leaves out {', '.join(left_out)}{advice}; vLLM reads an API key from "
            "VLLM_API_KEY in the environment and a hub token from HF_TOKEN",
            file=sys.stderr,
        )
    print(launch.endpoint, file=sys.stderr)
    if warning := launch.endpoint.warning:
        print(f"warning: {warning}", file=sys.stderr, flush=True)
