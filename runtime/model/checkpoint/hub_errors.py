"""Errors of the Hugging Face hub as errors of one line that say what to do."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from hdtool.data.errors import HdtoolError, ModelError, reason_of

LOG_IN = "run hf auth login, or set HF_TOKEN"
NO_SUCH = "there is no such folder here, and the hub has no such model"
STATUSES = {
    401: f"the hub refuses your token: {LOG_IN}",
    403: f"your token may not read it: take one with access to it, and {LOG_IN}",
    429: "the hub gets too many requests from you: wait some minutes and run the command again",
}


@contextmanager
def hub_errors_worded(name: str, revision: str | None = None, file: str | None = None) -> Iterator[None]:
    """Raise what the library of the hub raises as a ``ModelError``."""
    try:
        yield
    except HdtoolError:
        raise
    except Exception as error:
        raise ModelError(f"{name}: {hub_advice(error, name, revision, file)}") from error


def hub_advice(error: BaseException, name: str, revision: str | None = None, file: str | None = None) -> str:
    """What was wrong and what to do, without the name of the model."""
    from huggingface_hub import errors

    causes = list(_causes(error))
    page = f"https://huggingface.co/{name}"
    # The library may report that a file is not in the cache, and the answer of the hub as the cause.
    match next(
        (cause for cause in causes if isinstance(cause, (errors.HfHubHTTPError, errors.HFValidationError))), None
    ):
        case errors.GatedRepoError():
            return f"it is gated: accept its licence at {page}, then {LOG_IN}"
        case errors.RepositoryNotFoundError():
            return f"{NO_SUCH}, or it is private: check the name, and for a private model {LOG_IN}"
        case errors.RevisionNotFoundError():
            return f"it has no revision {revision or 'main'}: choose one of {page}/tree/main"
        case errors.DisabledRepoError():
            return f"the hub has disabled it: read {page}, or take another model"
        case errors.RemoteEntryNotFoundError():
            return f"it has no file {file}: see {page}/tree/main"
        case errors.HFValidationError():
            return "it is neither a folder here nor a name of the hub, which has the form OWNER/MODEL: check the name"
        case errors.HfHubHTTPError() as answer:
            status = answer.response.status_code
            return STATUSES.get(status, f"the hub answers with status {status}: try again later")
    return _without_answer(causes)


def _without_answer(causes: list[Exception]) -> str:
    from huggingface_hub.errors import OfflineModeIsEnabled

    if any(isinstance(cause, OfflineModeIsEnabled) for cause in causes) or _is_offline():
        return (
            f"{NO_SUCH} or cannot be reached, as HF_HUB_OFFLINE is set, and it is not in the hub's cache: unset "
            "HF_HUB_OFFLINE, or name a folder"
        )
    if full := next((cause for cause in causes if getattr(cause, "errno", None) == errno.ENOSPC), None):
        return f"there is no room for it ({full}): make room, or let HF_HOME name a folder on another disk"
    if denied := next((cause for cause in causes if isinstance(cause, PermissionError)), None):
        return f"the hub's cache cannot be written ({denied}): correct the permissions, or let HF_HOME name a folder"
    return f"{NO_SUCH} or cannot be reached ({reason_of(causes[-1])}): check the name and the connection"


def _causes(error: BaseException) -> Iterator[Exception]:
    """An error and what caused it."""
    found: BaseException | None = error
    while isinstance(found, Exception):
        yield found
        found = found.__cause__


def _is_offline() -> bool:
    from huggingface_hub.constants import HF_HUB_OFFLINE

    return bool(HF_HUB_OFFLINE)
