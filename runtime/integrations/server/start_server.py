"""Starts the server: binds the address, loads the model, and answers requests until a signal arrives."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import uvicorn

from hdtool.data.errors import ServeError
from hdtool.data.memory import freeze_objects
from hdtool.runtime.budget.measure_passes import quick_record
from hdtool.runtime.core.sampler import compile_sampling
from hdtool.runtime.drafters.drafter_factory import compile_ahead, finish_compiling
from hdtool.runtime.generation.generation_settings import refuse_settings
from hdtool.runtime.integrations.server.body_reader import MIB
from hdtool.runtime.integrations.server.endpoints import API_KEY_VARIABLE, ApiKeys, Server, TimedProtocol
from hdtool.runtime.integrations.server.engine_thread import EngineThread, Tenants
from hdtool.runtime.integrations.server.request_preparation import Preparer
from hdtool.runtime.settings.decoding import DecodeConfig, StoresConfig
from hdtool.runtime.settings.model import ModelConfig, SamplingConfig
from hdtool.runtime.settings.serving import ServerConfig
from hdtool.runtime.target.cpu_threads import choose_threads
from hdtool.runtime.target.load import load

LAST_SECONDS = 5
"""Seconds in which answers that have ended can still send their last events."""


class ServerLaunch:
    """A server that is ready to run; the address is bound first, to fail early if it is in use."""

    def __init__(
        self,
        model: ModelConfig,
        decoding: DecodeConfig,
        sampling: SamplingConfig,
        stores: StoresConfig,
        config: ServerConfig,
    ) -> None:
        keys = ApiKeys.read(Path(config.api_key_file) if config.api_key_file else None, os.environ)
        self._socket = _bound(config.host, config.port)
        self._config, self._has_keys = config, bool(keys.tenant_of_key)
        compile_ahead(model, decoding.method)
        loaded = load(model)
        finish_compiling()
        refuse_settings(loaded.target.model.generation_config)
        choose_threads(loaded.target, model.threads, quick_record(loaded.target, what="threads"))
        compile_sampling()
        self.tenants = Tenants(loaded, decoding, stores, keys.tenants)
        self._engine = EngineThread(
            loaded.target,
            self.tenants,
            decoding,
            max_waiting=config.max_waiting,
            prefix_bytes=config.prefix_cache_mib * MIB,
        )
        name = config.served_model_name or loaded.name
        self._socket.listen()
        preparer = Preparer(loaded, decoding, sampling, config.max_waiting)
        self._app = Server(loaded, self._engine, preparer, keys, config, name).app()

    @property
    def address(self) -> str:
        host, port = self._socket.getsockname()[:2]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"

    @property
    def warning(self) -> str | None:
        """Warning if other machines can use the server without an API key, else None."""
        host = self._socket.getsockname()[0]
        if self._has_keys or host == "::1" or host.startswith("127."):
            return None
        return (
            f"other machines can use this server without an API key: give --api-key-file, set {API_KEY_VARIABLE}, or "
            "listen on this machine alone with --host 127.0.0.1"
        )

    def run(self) -> None:
        """Answer requests until SIGINT or SIGTERM; answers in progress then have ``shutdown_seconds`` to complete."""
        config = uvicorn.Config(
            self._app,
            http=TimedProtocol,
            ws="none",
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=self._config.shutdown_seconds + LAST_SECONDS,
        )
        # Exclude loaded objects from garbage collection. A full collection runs once a quarter more objects are alive
        # than after the last collection. If loaded objects don't count, collections run often enough to free the
        # objects of requests.
        gc.collect()
        freeze_objects()
        gc.collect()
        server = _GracefulServer(config, self._engine, self._config.shutdown_seconds)
        asyncio.run(server.serve(sockets=[self._socket]))


class _GracefulServer(uvicorn.Server):
    """Exits with code 0 after SIGINT or SIGTERM; answers still running ``seconds`` later end with an error."""

    def __init__(self, config: uvicorn.Config, engine: EngineThread, seconds: float) -> None:
        super().__init__(config)
        self._engine, self._seconds = engine, seconds
        self._is_hurried = asyncio.Event()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        ending = asyncio.create_task(self._end_answers())
        await super().shutdown(sockets)
        ending.cancel()

    async def _end_answers(self) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._is_hurried.wait(), self._seconds)
        await asyncio.to_thread(self._engine.stop)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: Any) -> None:
        """Shut down; the next Ctrl-C ends all answers with an error, and one after it stops waiting for clients."""
        if self.should_exit and sig == signal.SIGINT and not self._is_hurried.is_set():
            self._is_hurried.set()
        else:
            super().handle_exit(sig, frame)
        print("shutting down", file=sys.stderr, flush=True)


def _bound(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listening = socket.socket(family)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        return listening
    except OSError as error:
        raise ServeError(
            f"the server cannot listen on {host}, port {port} ({error.strerror or error}): choose another --port or "
            "--host"
        ) from None
