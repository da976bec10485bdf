"""Settings of servers: vLLM's with our drafter, and our own."""

from __future__ import annotations

from dataclasses import dataclass

from hdtool.runtime.config.decoding import HISTORIES, HISTORY_HELP, MEMORY, NO_HISTORY
from hdtool.runtime.config.methods import LARGEST_BUDGET
from hdtool.runtime.config.setting import Settings, require, setting

TEXT, JSON_LINES = "text", "json"
LOG_FORMATS = (TEXT, JSON_LINES)


@dataclass(frozen=True)
class VllmConfig(Settings):
    """How hdtool drafts inside vLLM."""

    draft_tokens: int = setting(8, "Maximum number of draft tokens per request and step.", least=1, most=LARGEST_BUDGET)
    min_draft_prob: float | None = setting(
        None, "Minimum probability of a draft token, 0 to 1. Default: by the measured time of passes."
    )
    context_mib: int = setting(256, "Memory for the context tables of all requests, in MiB.", least=1)
    """Requests beyond it are not drafted for."""
    history: str = setting(MEMORY, HISTORY_HELP, values=HISTORIES)

    def __post_init__(self) -> None:
        super().__post_init__()
        fits = self.min_draft_prob is None or 0 < self.min_draft_prob <= 1
        require(fits, "min-draft-prob", self.min_draft_prob, "above 0 and at most 1")
        is_named = isinstance(self.history, str) and bool(self.history)
        require(is_named, "history", self.history, f"a folder, {', '.join(HISTORIES[:-1])} or {HISTORIES[-1]}")

    @property
    def keeps_history(self) -> bool:
        """Whether the history is kept on the disk."""
        return self.history not in (MEMORY, NO_HISTORY)


@dataclass(frozen=True)
class ServerConfig(Settings):
    """The address and the limits of hdtool's own server."""

    host: str = setting("127.0.0.1", "Address to listen on; 0.0.0.0 is every interface of this machine.")
    port: int = setting(8000, "Port to listen on; 0 is any free one.", least=0, most=2**16 - 1)
    api_key_file: str | None = setting(
        None,
        "File with a key on each line, or the name of a tenant and its key. Default: HDTOOL_API_KEY in the "
        "environment, else none.",
    )
    served_model_name: str | None = setting(None, "Name of the model in requests. Default: MODEL.")
    max_waiting: int = setting(
        256, "Maximum number of answers that wait for a place; more are refused with status 503.", least=1
    )
    max_body_mib: int = setting(8, "Largest body of a request, in MiB.", least=1)
    body_seconds: float = setting(10.0, "Longest time for the body of a request to arrive.")
    prefix_cache_mib: int = setting(
        1024, "Memory for contexts that are kept after their answers, in MiB; 0 keeps none.", least=0
    )
    log_requests: bool = setting(
        True, "Log one line per request to standard error, without text of prompts or answers."
    )
    log_format: str = setting(
        TEXT, f"Format of the request log: {TEXT}, or {JSON_LINES} (one object per line).", choices=LOG_FORMATS
    )
    shutdown_seconds: int = setting(30, "Time that answers in progress have to end when the server stops.", least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.body_seconds > 0, "body-seconds", self.body_seconds, "above 0")
