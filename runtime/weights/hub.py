"""Finds model files on this machine, and downloads them from the Hugging Face hub."""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any

from tqdm import tqdm

from hdtool.data import demo
from hdtool.data.errors import HdtoolError, ModelError, did_you_mean, error_reason, require_room
from hdtool.data.notes import note
from hdtool.data.progress import ProgressBar, progress_bar

LOG_IN = "run hf auth login, or set HF_TOKEN"
MODEL_NOT_FOUND = "there is no such folder here, and the hub has no such model"
STATUSES = {
    401: f"the hub refuses your token: {LOG_IN}",
    403: f"your token may not read it: take one with access to it, and {LOG_IN}",
    429: "the hub gets too many requests from you: wait some minutes and run the command again",
}


@contextmanager
def hub_errors_worded(name: str, revision: str | None = None, file: str | None = None) -> Iterator[None]:
    """Convert exceptions in the block, other than ``HdtoolError``, to a ``ModelError`` with advice."""
    try:
        yield
    except HdtoolError:
        raise
    except Exception as error:
        meant = did_you_mean(name, demo.NAMES)
        raise ModelError(f"{name}{meant}: {hub_advice(error, name, revision, file)}") from error


def hub_advice(error: BaseException, name: str, revision: str | None = None, file: str | None = None) -> str:
    """Return a message, without the model's name, that explains an error of ``huggingface_hub`` and says what to do."""
    from huggingface_hub import errors

    causes = list(_causes(error))
    page = f"https://huggingface.co/{name}"
    # The library may report a file missing from the cache, with the hub's answer as the cause of the error.
    match next(
        (cause for cause in causes if isinstance(cause, (errors.HfHubHTTPError, errors.HFValidationError))), None
    ):
        case errors.GatedRepoError():
            return f"it is gated: accept its licence at {page}, then {LOG_IN}"
        case errors.RepositoryNotFoundError():
            return f"{MODEL_NOT_FOUND}, or it is private: check the name, and for a private model {LOG_IN}"
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
            f"{MODEL_NOT_FOUND} or cannot be reached, as HF_HUB_OFFLINE is set, and it is not in the hub's cache: "
            "unset HF_HUB_OFFLINE, or name a folder"
        )
    if full := next((cause for cause in causes if getattr(cause, "errno", None) == errno.ENOSPC), None):
        return f"there is no room for it ({full}): make room, or let HF_HOME name a folder on another disk"
    if denied := next((cause for cause in causes if isinstance(cause, PermissionError)), None):
        return f"the hub's cache cannot be written ({denied}): correct the permissions, or let HF_HOME name a folder"
    return f"{MODEL_NOT_FOUND} or cannot be reached ({error_reason(causes[-1])}): check the name and the connection"


def _causes(error: BaseException) -> Iterator[Exception]:
    """Yield an error and its chain of causes."""
    cause: BaseException | None = error
    while isinstance(cause, Exception):
        yield cause
        cause = cause.__cause__


def _is_offline() -> bool:
    from huggingface_hub.constants import HF_HUB_OFFLINE

    return bool(HF_HUB_OFFLINE)


SINGLE = ("model.safetensors", "pytorch_model.bin")
INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
"""Names of the JSON files whose ``weight_map`` names the shard with each tensor."""
ADAPTERS = ("adapter_model.safetensors", "adapter_model.bin")
"""Files with adapter weights, which are added to the model's."""


def weight_files(folder: Path) -> list[Path] | None:
    """Return the weight files of the model stored in a folder, including adapters; None if no set is complete."""
    files = next(_complete(folder), None)
    return files and files + [folder / name for name in ADAPTERS if (folder / name).is_file()]


def weight_map(folder: Path, indexes: Sequence[str] = INDEXES) -> dict[str, str] | None:
    """Return the shard of each tensor that the folder's index lists, or None if there is no readable index."""
    for name in indexes:
        try:
            row = json.loads((folder / name).read_text(encoding="utf-8"))
            return {tensor: str(shard) for tensor, shard in row["weight_map"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue
    return None


def shards(folder: Path) -> list[str] | None:
    """Return the names of the shards that the folder's index lists, or None if there is no readable index."""
    found = weight_map(folder)
    return None if found is None else sorted({*found.values()})


def _complete(folder: Path) -> Iterator[list[Path]]:
    single, binary = ([folder / name] for name in SINGLE)
    sharded = [folder / name for name in shards(folder) or ()]
    for files in (single, sharded, binary):
        if files and all(file.is_file() for file in files):
            yield files


CONFIGURATION = ["*.json", "*.jinja", "*.txt", "*.model", "*.py", "*.tiktoken"]
"""Patterns of files other than weights: settings, tokenizers, chat templates and code."""
OTHER_FORMATS = ["onnx/*", "original/*", "coreml/*", "openvino/*", "runs/*"]
"""Patterns of repository folders that transformers does not read."""


@cache  # otherwise each lookup would ask the hub for the newest version
def snapshot(name: str, revision: str | None = None, *, weights: bool = False) -> Path:
    """Return a model's folder in the hub's cache; download missing files first, weights only if ``weights`` is True.

    Raise a ``ModelError`` if the model cannot be downloaded.
    """
    with hub_errors_worded(name, revision):
        folder = _with_configuration(name, revision)
    if weights and not weight_files(folder):
        _download_weights(name, folder)
    return folder


def cached_snapshot(name: str, revision: str | None = None) -> Path | None:
    """Return a model's folder in the hub's cache without asking the hub; None if it isn't cached."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        path = try_to_load_from_cache(name, "config.json", revision=revision)
    except (HFValidationError, OSError, ValueError):
        return None
    return Path(path).parent if isinstance(path, str) else None


@cache
def file_of(repository: str, name: str, revision: str | None = None) -> Path:
    """Return the path of a repository's file in the hub's cache; download it if missing, or raise a ``ModelError``."""
    from huggingface_hub import hf_hub_download

    with hub_errors_worded(repository, revision, name), _progress(repository) as counted:
        return Path(hf_hub_download(repository, name, revision=revision, tqdm_class=counted))


def _with_configuration(name: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        path = snapshot_download(
            name, revision=revision, allow_patterns=CONFIGURATION, ignore_patterns=OTHER_FORMATS, tqdm_class=_Silent
        )
    except LocalEntryNotFoundError:  # the missing files may not be needed
        if cached := cached_snapshot(name, revision):
            return cached
        raise
    return Path(path)


def _download_weights(name: str, folder: Path) -> None:
    """Download the weights of a snapshot's commit into the snapshot's folder; raise ModelError if it has none."""
    from huggingface_hub import snapshot_download

    commit = folder.name
    with hub_errors_worded(name, commit):
        for wanted in _forms(folder):
            plan = snapshot_download(name, revision=commit, allow_patterns=wanted, dry_run=True, tqdm_class=_Silent)
            missing = [file for file in plan if not file.is_cached]
            if not missing:
                continue
            size = sum(file.file_size or 0 for file in missing)
            require_room(name, size, folder, "HF_HOME")
            note(f"downloading {name}, once: {size:,} bytes in {folder}")
            with _progress(name, size) as counted:
                snapshot_download(name, revision=commit, allow_patterns=wanted, tqdm_class=counted)
            if weight_files(folder):
                return
    raise ModelError(
        f"{name} has no weights that can be loaded (no {' and no '.join(SINGLE)}; see "
        f"https://huggingface.co/{name}/tree/main): take another model, or a GGUF file of it with --gguf-file"
    )


def _forms(folder: Path) -> Iterator[list[str]]:
    """Yield alternative lists of weight files, in the order in which transformers looks for them."""
    adapters = list(ADAPTERS)
    if not (folder / INDEXES[0]).is_file():
        yield [SINGLE[0], *adapters]
    if listed := shards(folder):
        yield [*listed, *adapters]
    yield [SINGLE[1], *adapters]


class _Silent(tqdm):  # type: ignore[misc]
    """A progress bar that is never shown, for downloads of a few kilobytes."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        options.pop("name", None)
        super().__init__(*arguments, **{**options, "disable": True})


@contextmanager
def _progress(name: str, size: int = 0) -> Iterator[type[tqdm[Any]]]:
    """Yield a tqdm class for ``huggingface_hub`` whose instances all count their bytes in one bar on stderr."""
    with progress_bar(size, name, unit="B") as shown:
        yield _counting(shown)


def _counting(shown: ProgressBar) -> type[tqdm[Any]]:
    lock, total = Lock(), 0

    class Counting(_Silent):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            # The library counts bytes twice, when received and when written; only written bytes are counted here.
            self._counts = options.get("unit") == "B" and not str(options.get("desc")).startswith("Downloading bytes")
            super().__init__(*arguments, **options)

        def update(self, n: float | None = 1) -> bool | None:
            nonlocal total
            if self._counts:
                with lock:
                    total += int(n or 0)
                    shown.to(total)
            return None

    return Counting
