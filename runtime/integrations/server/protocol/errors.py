"""Errors of requests, in the form of OpenAI's API."""

from __future__ import annotations

from typing import Any

from hdtool.data.errors import HdtoolError

INVALID, AUTHENTICATION, OVERLOADED, SERVER = (
    "invalid_request_error",
    "authentication_error",
    "overloaded_error",
    "server_error",
)
DISCONNECTED = 499
"""The status of a request whose client has gone, as nginx logs it; nobody reads the response."""


class RequestError(HdtoolError):
    """A request that is refused."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = INVALID,
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self._kind, self._param, self._code = status, kind, param, code

    @property
    def name(self) -> str:
        """The code of the error, or its type; neither quotes the request."""
        return self._code or self._kind

    @property
    def body(self) -> dict[str, Any]:
        error = {"message": str(self), "type": self._kind, "param": self._param, "code": self._code}
        return {"error": error}
