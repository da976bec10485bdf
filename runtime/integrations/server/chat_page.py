"""The chat page, the headers that confine it, and the state of the server that it shows."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path, PurePath

from hdtool.runtime.integrations.server.engine_thread import EngineThread
from hdtool.runtime.integrations.server.openai_formats import JsonDict
from hdtool.runtime.settings.draft_sources import registered
from hdtool.runtime.stores.store_set import StoreSet

HARDENING = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Cache-Control": "no-cache",
}


@cache
def chat_page() -> str:
    return Path(__file__).with_name("page.html").read_text(encoding="utf-8")


@cache
def page_headers() -> dict[str, str]:
    """Return headers that let the page run its own script and style only, and connect to this server only."""
    policy = (
        "default-src 'none'",
        f"script-src {_hash_of('script')}",
        f"style-src {_hash_of('style')}",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
    return HARDENING | {"Content-Security-Policy": "; ".join(policy)}


def _hash_of(element: str) -> str:
    """Return the expression that admits the page's only script or style element in a Content-Security-Policy."""
    (content,) = re.findall(f"<{element}>(.*?)</{element}>", chat_page(), re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


def status_of(engine: EngineThread, tenant: str, max_cache_bytes: int, *, shows_inputs: bool) -> JsonDict:
    """Return the numbers of answers, the sizes of the caches, the tenant's stores, and the sources' colors.

    With ``shows_inputs``, a store names the files from which it was built.
    """
    saved = {"bytes": engine.prefixes.bytes, "max_bytes": max_cache_bytes} if engine.prefixes else {}
    return {
        "answers": {"running": engine.running, "waiting": engine.waiting, "max_running": engine.max_running},
        "cache": {"slot_tokens": engine.cached_tokens, **saved},
        "stores": list(_stores(engine.stores(tenant), shows_inputs=shows_inputs)),
        "sources": {source.name: {"light": source.light, "dark": source.dark} for source in registered().values()},
    }


def _stores(store_set: StoreSet, *, shows_inputs: bool) -> Iterator[JsonDict]:
    for store in (store_set.model, store_set.corpus):
        if store:
            manifest = store.manifest
            inputs = {"inputs": [PurePath(share.name).name for share in manifest.sources]} if shows_inputs else {}
            yield {"kind": manifest.kind, "name": store.folder.name, **inputs, "tokens": manifest.counts["tokens"]}
    if history := store_set.history:
        yield {"kind": "history", "name": history.store.folder.name if history.store else "memory"}
