"""The address of vLLM's server, and a warning if other machines can use it without an API key."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from ipaddress import ip_address

KEY_VARIABLE = "VLLM_API_KEY"
"""The environment variable that vLLM reads if --api-key is not given."""
DEFAULT_PORT = "8000"


class Endpoint:
    """The address of a server, from its options."""

    def __init__(self, options: Namespace, environment: Mapping[str, str]) -> None:
        self._host, self._port = options.host or None, options.port or DEFAULT_PORT
        self._socket = options.uds
        """The path of a Unix socket, which replaces host and port."""
        self._config = options.config
        """A file of further options, which vLLM reads itself."""
        self._has_key = any(options.api_key or [environment.get(KEY_VARIABLE)])

    def __str__(self) -> str:
        if self._socket:
            return f"the server listens on the Unix socket {self._socket}"
        address = f"the server listens on {self._host or 'all interfaces'}, port {self._port}"
        return f"{address}, unless {self._config} sets another address" if self._config and not self._host else address

    @property
    def warning(self) -> str | None:
        """What to change if other machines can use the server without a key, else None."""
        if self._socket or self._has_key or _is_loopback(self._host):
            return None
        unless = f", unless {self._config} sets one" if self._config else ""
        return (
            f"other machines can use this server without an API key{unless}: "
            f"set {KEY_VARIABLE} in the environment, or listen on this machine alone with --host 127.0.0.1"
        )


def _is_loopback(host: str | None) -> bool:
    if host is None:
        return False
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"
