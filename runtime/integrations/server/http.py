"""Reading requests within limits of size and time."""

from __future__ import annotations

import asyncio
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from hdtool.runtime.integrations.server.protocol.errors import DISCONNECTED, RequestError

M = TypeVar("M", bound=BaseModel)
MIB = 2**20


async def read_body(request: Request, most_mib: int, seconds: float) -> bytes:
    """The body of a request; raises if it is larger, or takes longer to arrive."""
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > most_mib * MIB:
        raise _too_large(most_mib)
    body = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for piece in request.stream():
                body += piece
                if len(body) > most_mib * MIB:
                    raise _too_large(most_mib)
    except TimeoutError:
        raise RequestError(f"the body did not arrive within {seconds:g} seconds", status=408) from None
    except ClientDisconnect:
        raise RequestError("the client closed the connection", status=DISCONNECTED) from None
    return bytes(body)


def _too_large(most_mib: int) -> RequestError:
    return RequestError(f"the body is larger than {most_mib} MiB", status=413, code="request_too_large")


def parsed(kind: type[M], body: bytes) -> M:
    """The body as a request; raises with the first field that is wrong."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        place = ".".join(str(part) for part in first["loc"] if not _is_branch(part))
        message = first["msg"].removeprefix("Value error, ")
        raise RequestError(f"{place}: {message}" if place else message, param=place or None) from None


def _is_branch(part: str | int) -> bool:
    """Whether a part of a place names one of several types that a field may have, and not a field."""
    return isinstance(part, str) and (part in ("str", "int", "none") or "[" in part)
