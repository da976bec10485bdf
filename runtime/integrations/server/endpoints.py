"""The server's HTTP layer: API keys, size and time limits on requests, and the handlers of all paths."""

from __future__ import annotations

import asyncio
import gc
import hmac
import json
import re
import sys
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from anyio import CapacityLimiter, to_thread
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from hdtool.data.errors import ContextError, HdtoolError, OptionError
from hdtool.data.input_files import read_text
from hdtool.runtime.integrations.server import messages_api, responses_api
from hdtool.runtime.integrations.server.body_reader import MIB, UnreadBodies, read_body
from hdtool.runtime.integrations.server.chat_page import chat_page, page_headers, status_of
from hdtool.runtime.integrations.server.choice_stream import ChoiceStream
from hdtool.runtime.integrations.server.engine_thread import EngineThread
from hdtool.runtime.integrations.server.messages_api import MessagesFormat, MessagesPrompt, MessagesRequest
from hdtool.runtime.integrations.server.metrics import Metrics
from hdtool.runtime.integrations.server.openai_formats import (
    AUTHENTICATION,
    DISCONNECTED,
    SERVER,
    ChatFormat,
    CompletionFormat,
    Delta,
    Format,
    JsonDict,
    RequestError,
)
from hdtool.runtime.integrations.server.openai_requests import (
    Body,
    ChatRequest,
    CompletionRequest,
    ConvertedRequest,
    GenerationRequest,
)
from hdtool.runtime.integrations.server.request_log import ENTRY_KEY, LogEntry, RequestLog
from hdtool.runtime.integrations.server.request_preparation import PreparedChoice, Preparer
from hdtool.runtime.integrations.server.responses_api import ResponsesFormat, ResponsesPrompt, ResponsesRequest
from hdtool.runtime.settings.serving import ServerConfig
from hdtool.runtime.target.load import Loaded

API_KEY_VARIABLE = "HDTOOL_API_KEY"
SHARED_TENANT = ""
"""Tenant of all requests if the server has no keys, and of keys without a tenant's name."""
TENANT_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,62}")
HEADER_SECONDS = 10.0
"""Seconds after which a connection is closed if it has sent no request, or no other one since the last response."""
COLLECTION_SECONDS = 5.0
PREPARATION_THREADS = 4
"""Maximum number of requests that are prepared at once."""
CHAT, COMPLETIONS, MODELS, STATUS = "/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/status"
PAGE = "/"
MESSAGES, COUNT_TOKENS = messages_api.PATH, f"{messages_api.PATH}/count_tokens"
RESPONSES, INPUT_TOKENS = responses_api.PATH, f"{responses_api.PATH}/input_tokens"
Handler = Callable[[Request], Awaitable[Response]]
R = TypeVar("R", bound=Body)
P = TypeVar("P")


@dataclass(frozen=True)
class ApiKeys:
    """Maps API keys to tenants; if there are no keys, requests need none."""

    tenant_of_key: Mapping[str, str]

    @classmethod
    def read(cls, path: Path | None, environment: Mapping[str, str]) -> ApiKeys:
        """Read keys from the file ``path``, or a single key from the environment if ``path`` is None.

        A line of the file is a key, or the name of a tenant and its key. Empty lines and lines that begin with # are
        skipped. Raise OptionError if a line is wrong or the file has no key, PromptError if the file cannot be read.
        """
        if path is None:
            key = environment.get(API_KEY_VARIABLE, "").strip()
            return cls({key: SHARED_TENANT} if key else {})
        keys: dict[str, str] = {}
        for number, line in enumerate(read_text(path, "give the keys as UTF-8 text").splitlines(), 1):
            words = line.split()
            if not words or words[0].startswith("#"):
                continue
            *tenant, key = words
            if len(tenant) > 1 or not all(map(TENANT_NAME.fullmatch, tenant)) or key in keys:
                raise OptionError(
                    f"{path}, line {number}: a line must be a key that no other line has, or the name of a tenant "
                    "(letters, digits, _ . -) and its key"
                )
            keys[key] = tenant[0] if tenant else SHARED_TENANT
        if not keys:
            raise OptionError(f"{path} holds no API key: write one on a line, or leave out --api-key-file")
        return cls(keys)

    @property
    def tenants(self) -> list[str]:
        return sorted({*self.tenant_of_key.values()}) or [SHARED_TENANT]

    def tenant(self, authorization: str | None) -> str | None:
        """Return the tenant whose key is in an ``Authorization`` header; None if the key is missing or wrong.

        If the server has no keys, this is the shared tenant.
        """
        if not self.tenant_of_key:
            return SHARED_TENANT
        scheme, _, given = (authorization or "").partition(" ")
        sent = given.strip().encode("latin-1", "replace")  # the bytes that the client sent, as headers are read
        matched = None
        # All keys are compared, each in constant time, so that the response time reveals nothing about them.
        for key, tenant in self.tenant_of_key.items():
            if hmac.compare_digest(key.encode(), sent) and scheme.lower() == "bearer":
                matched = tenant
        return matched


class Server:
    """The HTTP handlers of one server."""

    def __init__(
        self, loaded: Loaded, engine: EngineThread, preparer: Preparer, keys: ApiKeys, config: ServerConfig, name: str
    ) -> None:
        """``name`` is the name under which the model is served."""
        self._loaded, self._engine, self._preparer, self._keys = loaded, engine, preparer, keys
        self._config, self._name = config, name
        self._metrics = Metrics(engine)
        self._started = int(time.time())
        self._limiter = CapacityLimiter(PREPARATION_THREADS)
        self._paths: list[str] = []

    def app(self) -> Starlette:
        count_for_message = partial(self._count_tokens, kind=MessagesPrompt)
        count_for_response = partial(self._count_tokens, kind=ResponsesPrompt, object="response.input_tokens")
        routes = [
            Route(CHAT, self._guarded(self._chat), methods=["POST"]),
            Route(COMPLETIONS, self._guarded(self._completion), methods=["POST"]),
            Route(RESPONSES, self._guarded(self._response), methods=["POST"]),
            Route(INPUT_TOKENS, self._guarded(count_for_response), methods=["POST"]),
            Route(MESSAGES, self._guarded(self._message), methods=["POST"]),
            Route(COUNT_TOKENS, self._guarded(count_for_message), methods=["POST"]),
            Route(MODELS, self._guarded(self._models)),
            Route(f"{MODELS}/{{name:path}}", self._guarded(self._model)),
            Route(STATUS, self._guarded(self._status)),
            Route("/health", self._health),
            Route("/metrics", self._show_metrics),
        ]
        if self._config.page:
            routes.append(Route(PAGE, self._chat_page))
        self._paths = [route.path for route in routes if not route.param_convertors]
        handlers: Any = {HTTPException: self._http_error, Exception: self._fault}
        log = Middleware(RequestLog, shown=self._config.log_requests, form=self._config.log_format)
        middleware = [log, Middleware(UnreadBodies, seconds=self._config.body_seconds)]
        return Starlette(routes=routes, middleware=middleware, exception_handlers=handlers, lifespan=self._lifespan)

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        self._engine.start()
        collecting = asyncio.create_task(_collect_garbage())
        yield
        collecting.cancel()
        await to_thread.run_sync(self._engine.stop)

    def _guarded(self, handler: Handler) -> Handler:
        """Wrap a handler to check the API key, format errors as the requested API does, and count requests."""

        async def guarded(request: Request) -> Response:
            try:
                request.state.tenant = request.scope[ENTRY_KEY].tenant = self._tenant(request)
                response = await handler(request)
            except HdtoolError as error:
                response = _refused(request, error)
            self._count(request, response.status_code)
            return response

        return guarded

    def _count(self, request: Request, status: int) -> None:
        path = request.scope["path"]
        self._metrics.request(path if path in self._paths else "other", status)

    def _tenant(self, request: Request) -> str:
        headers = request.headers
        key = headers.get("x-api-key")  # as Anthropic's clients send it
        tenant = self._keys.tenant(headers.get("authorization") or (key and f"Bearer {key}"))
        if tenant is None:
            raise RequestError(
                "the API key is missing or wrong: send it as Authorization: Bearer KEY",
                status=401,
                kind=AUTHENTICATION,
                code="invalid_api_key",
            )
        return tenant

    async def _chat(self, request: Request) -> Response:
        body, choices = await self._prepared(request, ChatRequest, partial(self._chosen, request))
        form = ChatFormat(self._name, self._loaded.tokenizer, len(choices), with_usage=_with_usage(body))
        return await self._answer(request, choices, form, stream=bool(body.stream))

    async def _completion(self, request: Request) -> Response:
        body, choices = await self._prepared(request, CompletionRequest, self._preparer.completion)
        echoes = [choice.prompt.echo for choice in choices]
        form = CompletionFormat(self._name, self._loaded.tokenizer, echoes, with_usage=_with_usage(body))
        return await self._answer(request, choices, form, stream=bool(body.stream))

    async def _response(self, request: Request) -> Response:
        body, choices = await self._prepared(request, ResponsesRequest, partial(self._chosen, request))
        form = ResponsesFormat(self._name, self._loaded.tokenizer, body)
        return await self._answer(request, choices, form, stream=bool(body.stream))

    async def _message(self, request: Request) -> Response:
        body, choices = await self._prepared(request, MessagesRequest, partial(self._chosen, request))
        form = MessagesFormat(self._name, shows_thinking=body.shows_thinking)
        return await self._answer(request, choices, form, stream=bool(body.stream))

    def _chosen(self, request: Request, body: ChatRequest | ConvertedRequest) -> list[PreparedChoice]:
        return self._preparer.chat(body.chat(), request.state.tenant)

    async def _count_tokens(self, request: Request, *, kind: type[ConvertedRequest], **fields: str) -> Response:
        """Answer with the number of prompt tokens and the ``fields`` that the API adds to it."""
        _, tokens = await self._prepared(request, kind, lambda body: self._preparer.tokens(body.chat()))
        return JSONResponse({**fields, "input_tokens": tokens})

    async def _prepared(self, request: Request, kind: type[R], prepare: Callable[[R], P]) -> tuple[R, P]:
        """Read a request's body; parse it and run ``prepare``, both in a worker thread; return ``(body, result)``."""
        json_text = await read_body(request, self._config.max_body_mib, self._config.body_seconds)

        def prepared() -> tuple[R, P]:
            body = kind.read(json_text)
            self._check_model(body.model)
            return body, prepare(body)

        return await to_thread.run_sync(prepared, limiter=self._limiter)

    def _check_model(self, requested: str | None) -> None:
        if requested is not None and requested not in (self._name, self._loaded.name):
            raise RequestError(
                f"the model {requested[:200]!r} is not served here: ask for {self._name}",
                status=404,
                param="model",
                code="model_not_found",
            )

    async def _answer(
        self, request: Request, choices: Sequence[PreparedChoice], form: Format, *, stream: bool
    ) -> Response:
        answers = ChoiceStream(self._engine, self._metrics, choices)
        answers.submit(request.state.tenant)
        entry: LogEntry = request.scope[ENTRY_KEY]
        entry.model, entry.answers = self._name, answers
        if stream:
            return StreamingResponse(
                _events(answers, entry, form),
                media_type="text/event-stream",
                headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
            )
        return await _unless_disconnected(request, partial(_whole, answers, len(choices), form))

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._description]})

    async def _model(self, request: Request) -> Response:
        self._check_model(request.path_params["name"])
        return JSONResponse(self._description)

    @property
    def _description(self) -> dict[str, Any]:
        limit = self._loaded.target.context_limit(1)
        made = {"id": self._name, "object": "model", "created": self._started, "owned_by": "hdtool"}
        return made | ({"max_model_len": limit} if limit else {})

    async def _status(self, request: Request) -> Response:
        max_bytes = self._config.prefix_cache_mib * MIB
        shows_inputs = self._keys.tenants == [SHARED_TENANT]
        status = status_of(self._engine, request.state.tenant, max_bytes, shows_inputs=shows_inputs)
        return JSONResponse({"model": self._name, **status})

    async def _chat_page(self, request: Request) -> Response:
        self._count(request, 200)
        return Response(chat_page(), media_type="text/html", headers=page_headers())

    async def _health(self, request: Request) -> Response:
        if self._engine.is_alive:
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": "the engine has stopped"}, status_code=503)

    async def _show_metrics(self, request: Request) -> Response:
        return Response(self._metrics.text(), media_type="text/plain; version=0.0.4")

    async def _http_error(self, request: Request, error: HTTPException) -> Response:
        status = error.status_code
        path = request.url.path[:200]
        if allowed := (error.headers or {}).get("Allow"):
            message = f"{path} does not take {request.method}: use {allowed}"
        else:
            message = f"there is no {path} here: the paths are {', '.join(self._paths)}"
        self._metrics.request("other", status)
        refused = _refused(request, RequestError(message, status=status))
        refused.headers.update(error.headers or {})
        return refused

    async def _fault(self, request: Request, error: Exception) -> Response:
        failure = _failure()
        self._count(request, failure.status)
        return _refused(request, failure)


class TimedProtocol(H11Protocol):
    """Closes connections that send no request within ``HEADER_SECONDS``, also after a response."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._await_request()

    def on_response_complete(self) -> None:
        self._await_request()  # first, because ``super`` starts a request that has already arrived
        super().on_response_complete()

    def _await_request(self) -> None:
        self.loop.call_later(HEADER_SECONDS, self._close_without_request, self.scope)

    def _close_without_request(self, last_scope: object) -> None:
        """Close the connection if no request has arrived since ``last_scope``, the scope of the last one, if any."""
        if self.scope is last_scope and not self.transport.is_closing():
            self.transport.close()


async def _collect_garbage() -> None:
    """Collect garbage periodically, because Python triggers collections by the number of objects, not by their size."""
    while True:
        await asyncio.sleep(COLLECTION_SECONDS)
        gc.collect()


def _with_usage(body: GenerationRequest) -> bool:
    return bool(body.stream_options and body.stream_options.include_usage)


async def _events(answers: ChoiceStream, entry: LogEntry, form: Format) -> AsyncIterator[str]:
    """Stream an answer as server-sent events; an error becomes the last event."""
    try:
        for row in form.opening(answers.prompt_tokens):
            yield _event(row)
        async for index, delta in answers.deltas():
            for row in form.added(index, delta):
                yield _event(row)
        for row in form.closing(answers.usage):
            yield _event(row)
        if form.last_event:
            yield f"data: {form.last_event}\n\n"
    except RequestError as error:
        entry.status, entry.error = error.status, error.name
        yield _event(form.failed(error))
    except (asyncio.CancelledError, GeneratorExit):
        entry.status = DISCONNECTED
        raise
    except Exception:
        traceback.print_exc(file=sys.stderr)
        failure = _failure()
        entry.status, entry.error = failure.status, failure.name
        yield _event(form.failed(failure))
    finally:
        answers.cancel()


async def _whole(answers: ChoiceStream, choices: int, form: Format) -> Response:
    collected = [Delta() for _ in range(choices)]
    async for index, delta in answers.deltas():
        collected[index].add(delta)
    return Response(_json(form.whole(collected, answers.usage)), media_type="application/json")


async def _unless_disconnected(request: Request, answer: Callable[[], Awaitable[Response]]) -> Response:
    """Return the response of ``answer()``; if the client disconnects first, cancel it and return an empty response."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    answering, leaving = asyncio.ensure_future(answer()), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if answering.done():
            return answering.result()
        return Response(status_code=DISCONNECTED)  # for the log, as the client is gone
    finally:
        for task in (answering, leaving):
            task.cancel()
        await asyncio.gather(answering, leaving, return_exceptions=True)


def _event(row: JsonDict) -> str:
    name = f"event: {row['type']}\n" if "type" in row else ""
    return f"{name}data: {_json(row)}\n\n"


def _json(row: JsonDict) -> str:
    """Return JSON text in which U+FFFD replaces lone surrogates, which models can write as JSON escapes."""
    text = json.dumps(row, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _failure() -> RequestError:
    return RequestError("the server failed; its log has the reason", status=500, kind=SERVER)


def _refused(request: Request, error: HdtoolError) -> Response:
    is_message = request.scope["path"].startswith(MESSAGES)
    if isinstance(error, ContextError):
        message = messages_api.too_long(error) if is_message else str(error)
        error = RequestError(message, code="context_length_exceeded")
    if not isinstance(error, RequestError):
        error = RequestError(str(error))
    request.scope[ENTRY_KEY].error = error.name
    headers = {"Retry-After": "1"} if error.status == 503 else {}
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    body = messages_api.error_body(error) if is_message else error.body
    return JSONResponse(body, status_code=error.status, headers=headers)
