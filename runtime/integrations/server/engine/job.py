"""One answer that the engine generates."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from hdtool.runtime.drafter import Drafter
from hdtool.runtime.loop import Request
from hdtool.runtime.sequence import Step


@dataclass(eq=False)
class Job:
    """A request to the engine, and where its steps go."""

    tenant: str
    request: Callable[[Job, Drafter], Request[Job]]
    """Makes the request of this job once a drafter is free."""
    deliver: Callable[[Step | Exception], None]
    """Called in the engine's thread with each step, and with the error that ends the answer if there is one."""
    is_cancelled: bool = False
    """Nobody waits for the rest of the answer."""
    submitted: float = field(default_factory=time.monotonic)
