"""``hdtool serve``: vLLM's server, drafting from the stores that fit its model."""

from __future__ import annotations

import shlex
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated

import typer

from hdtool.cli import options
from hdtool.data.errors import OptionError, ServeError
from hdtool.runtime.config import ServeConfig, StoresConfig

if TYPE_CHECKING:
    from hdtool.runtime.integrations.vllm.launch import Launch

PASSED_ON = {"ignore_unknown_options": True}
"""For typer: what hdtool does not know is vLLM's."""


def serve(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL [VLLM OPTIONS]",
            help="Folder or hub name of the model, then any option of vllm serve. Default: the embedded demo model.",
        ),
    ] = None,
    draft_tokens: Annotated[
        int, typer.Option(help="Tokens drafted for each request in a step, at most.")
    ] = ServeConfig.draft_tokens,
    model_db: options.ModelDb = StoresConfig.model_db,
    corpus_db: options.CorpusDb = StoresConfig.corpus_db,
    namespace: Annotated[
        str | None,
        typer.Option(help="Whose stores to use. Default: those of the name under which the model is served, if any."),
    ] = StoresConfig.namespace,
    worth: Annotated[
        float | None,
        typer.Option(help="Send drafts from these odds on, 0 to 1. Default: those that pay, by what passes take."),
    ] = ServeConfig.worth,
    context_mib: Annotated[
        int, typer.Option(help="Memory for the context tables of all requests, in MiB.")
    ] = ServeConfig.context_mib,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the command and do not run it.")] = False,
) -> None:
    """Serve a model with vLLM, drafting from the stores that fit its tokenizer.

    vLLM's own OpenAI-compatible server: every option that is not listed here goes to it. Prints the command that it
    runs. Needs pip install "hdtool[vllm]".
    """
    serving = ServeConfig(draft_tokens, worth, context_mib)
    model, *passed_on = arguments or [""]
    if model.startswith("-"):
        raise OptionError(
            f"{model.partition('=')[0]} stands where the model is expected: hdtool serve MODEL [VLLM OPTIONS]"
        )
    if not dry_run and not find_spec("vllm"):
        raise ServeError(
            'vLLM is not installed here: pip install "hdtool[vllm]", or have the command printed for another place by '
            "--dry-run"
        )

    from hdtool.cli.output.show_answers import quiet_libraries, tell_sources
    from hdtool.data import demo
    from hdtool.runtime.integrations.vllm.launch import Launch

    quiet_libraries()
    launch = Launch(model or str(demo.MODEL), passed_on, serving, StoresConfig(model_db, corpus_db, namespace))
    tell_sources(launch.store_set)
    _show(launch, dry_run=dry_run)
    if not dry_run:
        launch.run()


def _show(launch: Launch, *, dry_run: bool) -> None:
    """Print the command, where the server listens, and what is dangerous about it."""
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
