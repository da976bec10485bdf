"""The address of vLLM's server, and a warning if other machines can use it without an API key."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_address

KEY_VARIABLE = "VLLM_API_KEY"
"""The environment variable that vLLM reads if --api-key is not given."""
DEFAULT_PORT = "8000"


@dataclass(frozen=True)
class Endpoint:
    """The address of a server, from its options."""

    host: str | None
    """None means all interfaces."""
    port: str
    socket: str | None
    """The path of a Unix socket, which replaces host and port."""
    has_key: bool
    config: str | None
    """A file of further options, which vLLM reads itself."""

    @classmethod
    def of(cls, options: Namespace, environment: Mapping[str, str]) -> Endpoint:
        keys = options.api_key or [environment.get(KEY_VARIABLE, "")]
        return cls(options.host or None, options.port or DEFAULT_PORT, options.uds or None, any(keys), options.config)

    def __str__(self) -> str:
        if self.socket:
            return f"the server listens on the Unix socket {self.socket}"
        address = f"the server listens on {self.host or 'all interfaces'}, port {self.port}"
        return f"{address}, unless {self.config} sets another address" if self.config and not self.host else address

    @property
    def warning(self) -> str | None:
        """What to change if other machines can use the server without a key, else None."""
        if self.socket or self.has_key or _is_loopback(self.host):
            return None
        unless = f", unless {self.config} sets one" if self.config else ""
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
