"""Reads request bodies within limits on size and time, and discards what a refused request leaves unread."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hdtool.runtime.integrations.server.openai_formats import DISCONNECTED, RequestError

MIB = 2**20


async def read_body(request: Request, max_mib: int, seconds: float) -> bytes:
    """Read a request's body; raise RequestError if it is too large, arrives late, or the client disconnects."""
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > max_mib * MIB:
        raise _too_large(max_mib)
    body = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for piece in request.stream():
                body += piece
                if len(body) > max_mib * MIB:
                    raise _too_large(max_mib)
    except TimeoutError:
        raise RequestError(f"the body did not arrive within {seconds:g} seconds", status=408) from None
    except ClientDisconnect:
        raise RequestError("the client closed the connection", status=DISCONNECTED) from None
    return bytes(body)


def _too_large(max_mib: int) -> RequestError:
    return RequestError(f"the body is larger than {max_mib} MiB", status=413, code="request_too_large")


class UnreadBodies:
    """Middleware that discards what is left of a request's body before the response begins.

    A server that closes a connection with unread data resets it, and the client loses the response: one that sends
    ``Connection: close``, such as ``urllib``, would see no error but the reset (RFC 9112, section 9.6).
    """

    def __init__(self, app: ASGIApp, seconds: float) -> None:
        """Discard what is left of a body until at most ``seconds`` after the beginning of its request."""
        self._app, self._seconds = app, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        deadline = asyncio.get_running_loop().time() + self._seconds
        # A client that awaits 100 (Continue), which the first ``receive`` sends, has not begun to send its body.
        is_sent = "100-continue" not in Headers(scope=scope).get("expect", "").lower()
        is_read = False

        async def receive_piece() -> Message:
            nonlocal is_sent, is_read
            is_sent = True
            message = await receive()
            is_read = not message.get("more_body")
            return message

        async def send_after_body(message: Message) -> None:
            if message["type"] == "http.response.start" and is_sent:
                with suppress(TimeoutError):
                    async with asyncio.timeout_at(deadline):
                        while not is_read:
                            await receive_piece()
            await send(message)

        return await self._app(scope, receive_piece, send_after_body)
