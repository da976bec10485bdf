"""``hdtool serve``: run hdtool's server, or vLLM's server with drafts from hdtool."""

from __future__ import annotations

import shlex
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated

import typer

from hdtool.cli.command import Option, quiet_libraries
from hdtool.cli.options_from_settings import without
from hdtool.data.errors import OptionError, ServeError, did_you_mean, install_command
from hdtool.data.notes import note, tell
from hdtool.runtime.settings.decoding import DecodeConfig, StoresConfig
from hdtool.runtime.settings.model import ModelConfig, SamplingConfig
from hdtool.runtime.settings.serving import ServerConfig, VllmConfig
from hdtool.runtime.settings.settings_base import Panel

if TYPE_CHECKING:
    from hdtool.runtime.integrations.vllm.start_vllm import Launch

HDTOOL_ENGINE, VLLM_ENGINE = "hdtool", "vllm"
SERVER_BATCH_SIZE, SERVER_MAX_NEW_TOKENS = 8, 4096
SERVER_DECODING = without(batch_size=SERVER_BATCH_SIZE, max_new_tokens=SERVER_MAX_NEW_TOKENS).described(
    batch_size="Answers generated at once. Streamed or not (continuous batching); further ones wait.",
    prefix_caching="Keep the KV caches of earlier answers: a prompt is read from where it differs from one of them.",
)
EngineOption = Annotated[
    str,
    Option(
        Panel.SERVER,
        f"{HDTOOL_ENGINE} or {VLLM_ENGINE}. {HDTOOL_ENGINE} is for few users at once, on any device; "
        "each has options of its own.",
        values=(HDTOOL_ENGINE, VLLM_ENGINE),
    ),
]  # fmt: skip


def serve(
    *,
    engine: EngineOption = HDTOOL_ENGINE,
    server: ServerConfig,
    decoding: Annotated[DecodeConfig, SERVER_DECODING],
    stores: StoresConfig,
    sampling: Annotated[SamplingConfig, without("seed", "stop", temperature=1.0)],
    loading: Annotated[ModelConfig, without().as_argument()],
) -> None:
    """Serve a model through the OpenAI and Anthropic APIs.

    Answers of several requests are generated in one batch. The sampling options hold for requests that leave them
    open, and so does --max-new-tokens. hdtool serve --engine vllm --help shows the options of the other engine.
    """
    if engine != HDTOOL_ENGINE:
        meant = did_you_mean(engine, (HDTOOL_ENGINE, VLLM_ENGINE))
        raise OptionError(f"--engine must be {HDTOOL_ENGINE} or {VLLM_ENGINE}, got {engine}{meant}")

    from hdtool.cli.answer_output import print_stores
    from hdtool.runtime.integrations.server.start_server import ServerLaunch

    quiet_libraries()
    if loading.model is None:
        tell("serving the embedded toy model: hdtool serve MODEL names another")
    launch = ServerLaunch(loading, decoding, sampling, stores, server)
    for tenant, store_set in launch.tenants.store_sets.items():
        if tenant:
            tell(f"tenant {tenant}:")
        print_stores(store_set)
    tell(f"the server listens on {launch.address}")
    if server.page:
        tell(f"a page to chat on is at {launch.address.removesuffix('v1')}")
    if warning := launch.warning:
        tell(f"warning: {warning}")
    sys.stderr.flush()
    launch.run()


def uses_vllm(words: list[str]) -> bool:
    """Return True if a command line, without the program's name, is ``serve --engine vllm``."""
    engine = HDTOOL_ENGINE
    for place, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name == "--engine":
            engine = value if equals else "".join(words[place + 1 : place + 2])
    return words[:1] == ["serve"] and engine == VLLM_ENGINE


PASS_UNKNOWN_OPTIONS = {"ignore_unknown_options": True}
"""Typer settings that keep unknown options, so that vLLM receives them."""


def serve_vllm(
    *,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL [VLLM OPTIONS]",
            help="Folder or hub name of the model, then any option of vllm serve. Default: the embedded demo model.",
        ),
    ] = None,
    model: Annotated[str | None, Option(Panel.MODEL, "The model, if it is not the first argument.", "--model")] = None,
    engine: EngineOption = VLLM_ENGINE,
    serving: VllmConfig,
    stores: StoresConfig,
    dry_run: Annotated[bool, Option(Panel.OUTPUT, "Print the command without running it.", "--dry-run")] = False,
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

    from hdtool.cli.answer_output import print_stores
    from hdtool.data import demo
    from hdtool.runtime.integrations.vllm.start_vllm import Launch

    quiet_libraries()
    launch = Launch(model or str(demo.MODEL), passed_on, serving, stores)
    print_stores(launch.store_set)
    if not dry_run and (folder := launch.open_history()):
        tell(f"keeping answers in {folder}")
    _show(launch, dry_run=dry_run)
    if not dry_run:
        launch.run()


def _show(launch: Launch, *, dry_run: bool) -> None:
    """Print the command, the server's address, and a warning if other machines can reach the server."""
    command, left_out = launch.printable
    print(shlex.join(command), file=sys.stdout if dry_run else sys.stderr, flush=True)
    if left_out:
        advice = ": set them where the command runs" if dry_run else ""
        note(
            f"the printed command leaves out {', '.join(left_out)}{advice}; vLLM reads an API key from "
            "VLLM_API_KEY in the environment and a hub token from HF_TOKEN"
        )
    tell(launch.endpoint)
    if warning := launch.endpoint.warning:
        tell(f"warning: {warning}")
