"""``hdtool serve``: a server with the APIs of OpenAI and Anthropic that drafts from the stores that fit its model."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import Annotated

from hdtool.cli.parameters.command import SERVER, option
from hdtool.cli.parameters.settings import without
from hdtool.data.errors import OptionError, ServeError
from hdtool.data.extras import install_command
from hdtool.runtime.config import DecodeConfig, ModelConfig, SamplingConfig, ServerConfig, StoresConfig

OWN, VLLM = "hdtool", "vllm"
LIBRARIES = ("starlette", "uvicorn", "pydantic", "prometheus_client")
BATCH, LONGEST = 8, 4096
Engine = Annotated[
    str,
    option(
        SERVER, f"Engine: {OWN}, for few users at once on any device, or {VLLM}; each has options of its own.",
        values=(OWN, VLLM),
    ),
]  # fmt: skip


def serve(
    *,
    engine: Engine = OWN,
    server: ServerConfig,
    decoding: Annotated[DecodeConfig, without(batch_size=BATCH, max_new_tokens=LONGEST)],
    stores: StoresConfig,
    sampling: Annotated[SamplingConfig, without("seed", "stop", temperature=1.0)],
    loading: Annotated[ModelConfig, without().as_argument()],
) -> None:
    """Serve a model by the APIs of OpenAI and Anthropic.

    Answers of several requests are generated in one batch. The sampling options hold for requests that leave them
    open, and so does --max-new-tokens. Needs the extra server, pip install ".[server]". hdtool serve --engine vllm
    --help shows the options of the other engine.
    """
    if engine != OWN:
        raise OptionError(f"--engine must be {OWN} or {VLLM}, got {engine}")
    missing = [name for name in LIBRARIES if not find_spec(name)]
    if missing:
        raise ServeError(f"the server needs {', '.join(missing)}: {install_command('server')}")

    from hdtool.cli.output.show_answers import print_sources, quiet_libraries
    from hdtool.runtime.integrations.server.launch import Launch

    quiet_libraries()
    if loading.model is None:
        print("serving the embedded toy model: hdtool serve MODEL names another", file=sys.stderr)
    launch = Launch(loading, decoding, sampling, stores, server)
    for tenant, store_set in launch.tenants.store_sets.items():
        if tenant:
            print(f"tenant {tenant}:", file=sys.stderr)
        print_sources(store_set)
    print(f"the server listens on {launch.address}", file=sys.stderr)
    if warning := launch.warning:
        print(f"warning: {warning}", file=sys.stderr)
    sys.stderr.flush()
    launch.run()


def engine_of(words: list[str]) -> str:
    """The engine that a command line asks for."""
    found = OWN
    for place, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name == "--engine":
            found = value if equals else "".join(words[place + 1 : place + 2])
    return found
