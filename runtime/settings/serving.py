"""Settings of serving: how hdtool drafts in vLLM, and its own server."""

from __future__ import annotations

from dataclasses import dataclass

from hdtool.runtime.settings.decoding import HISTORIES, HISTORY_HELP, MEMORY, NO_HISTORY
from hdtool.runtime.settings.draft_token_limits import LARGEST_BUDGET
from hdtool.runtime.settings.settings_base import Panel, Settings, rare_setting, require, setting

TEXT, JSON_LINES = "text", "json"
LOG_FORMATS = (TEXT, JSON_LINES)


@dataclass(frozen=True)
class VllmConfig(Settings, panel=Panel.DRAFTING):
    """How hdtool drafts in vLLM."""

    draft_tokens: int = setting(
        8, "Maximum number of draft tokens per request and step.", min_value=1, max_value=LARGEST_BUDGET
    )
    min_draft_prob: float | None = rare_setting(
        None, "Minimum probability that a draft token is accepted, 0 to 1. Default: by the measured time of passes."
    )
    context_mib: int = rare_setting(256, "Memory for the context tables of all requests, in MiB.", min_value=1)
    """Requests whose tables don't fit get no drafts."""
    history: str = setting(MEMORY, HISTORY_HELP, values=HISTORIES)

    def __post_init__(self) -> None:
        super().__post_init__()
        fits = self.min_draft_prob is None or 0 < self.min_draft_prob <= 1
        require(fits, "min-draft-prob", self.min_draft_prob, "above 0 and at most 1")
        is_named = isinstance(self.history, str) and bool(self.history)
        require(is_named, "history", self.history, f"a folder, {', '.join(HISTORIES[:-1])} or {HISTORIES[-1]}")

    @property
    def keeps_history(self) -> bool:
        """True if the history is kept on disk."""
        return self.history not in (MEMORY, NO_HISTORY)


@dataclass(frozen=True)
class ServerConfig(Settings, panel=Panel.SERVER):
    """Address, limits and logging of hdtool's server."""

    host: str = setting("127.0.0.1", "Address to listen on. 0.0.0.0 is every interface of this machine.")
    port: int = setting(8000, "Port to listen on. 0 is any free one.", min_value=0, max_value=2**16 - 1)
    api_key_file: str | None = setting(
        None,
        "File of API keys, one per line. The name of its tenant may precede a key. Default: HDTOOL_API_KEY in the "
        "environment, else none.",
    )
    served_model_name: str | None = setting(None, "Name of the model in requests. Default: MODEL.")
    page: bool = setting(True, "Serve a page to chat on. It is at /, and shows what was drafted.")
    max_waiting: int = rare_setting(
        256, "Maximum number of answers that wait for a place; more are refused with status 503.", min_value=1
    )
    max_body_mib: int = rare_setting(8, "Largest body of a request, in MiB.", min_value=1)
    body_seconds: float = rare_setting(10.0, "Longest time for the body of a request to arrive.")
    prefix_cache_mib: int = rare_setting(
        1024, "Memory for contexts of earlier answers, besides idle batch slots, in MiB; 0 keeps none.", min_value=0
    )
    log_requests: bool = rare_setting(
        True, "Log one line per request to standard error, without text of prompts or answers."
    )
    log_format: str = rare_setting(
        TEXT, f"Format of the request log: {TEXT}, or {JSON_LINES} (one object per line).", choices=LOG_FORMATS
    )
    shutdown_seconds: int = rare_setting(
        30, "Time that answers in progress have to end when the server stops.", min_value=0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.body_seconds > 0, "body-seconds", self.body_seconds, "above 0")
