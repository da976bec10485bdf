"""Errors that the user can correct, and installation commands for missing packages.

Each message is one line: what was wrong, what was found, what to do next. The command line prints the message and exits
with ``exit_code``. hdtool is on no package index, so the installation commands list an extra's packages instead of
naming the extra.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from packaging.requirements import Requirement


@contextmanager
def os_errors_as(error: type[HdtoolError], fault: str, advice: str) -> Iterator[None]:
    """Re-raise an OSError in the block as ``error``, with the message ``fault (reason): advice``."""
    try:
        yield
    except OSError as cause:
        raise error(f"{fault} ({cause.strerror or cause}): {advice}") from cause


SPARE_BYTES = 1 << 26
"""Disk space in bytes to leave free."""


def require_room(name: str, needed: int, folder: Path, variable: str) -> None:
    """Raise ModelError if ``folder``'s disk lacks room for ``needed`` bytes and ``SPARE_BYTES`` more.

    ``variable`` is the environment variable that sets the folder, and ``name`` names what needs the room.
    """
    if (free := shutil.disk_usage(folder).free) < needed + SPARE_BYTES:
        raise ModelError(
            f"{name} needs {needed:,} bytes in {folder}, whose disk has {free:,}: make room, or let {variable} name a "
            "folder on another one"
        )


FULL_DISK_BYTES = 1 << 20
"""Free space in bytes below which a failed write is blamed on a full disk."""


def write_fault(folder: Path, error: Exception) -> str:
    """Return why a file in ``folder`` could not be written.

    LMDB and numpy report a full disk as a failed or short write, without the error number ENOSPC.
    """
    code, free = getattr(error, "errno", None), shutil.disk_usage(folder).free
    if code == errno.ENOSPC or free < FULL_DISK_BYTES:
        return f"the disk is full, {free >> 20} MiB free"
    reason = getattr(error, "strerror", None) or error_reason(error)
    return reason if code and code != errno.EIO else f"the disk is full or failing: {reason}"


def error_reason(error: Exception) -> str:
    """Return the first line of an exception's message, or the exception's class name if the message is empty."""
    return str(error).strip().split("\n")[0] or type(error).__name__


def lone_surrogate(text: str) -> str | None:
    """Describe the first lone surrogate in a text, as in ``U+D83D at character 3``; None if the text is valid Unicode.

    JSON escapes and invalid bytes on a command line can produce lone surrogates, which no tokenizer accepts.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"U+{ord(text[error.start]):04X} at character {error.start}"
    return None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `` (did you mean X?)`` for the known word that is most similar to ``word``, or "" if none is similar."""
    from difflib import get_close_matches

    by_lower_case = {one.lower(): one for one in known}
    similar = get_close_matches(word.lower(), by_lower_case, n=1)
    return f" (did you mean {by_lower_case[similar[0]]}?)" if similar else ""


class HdtoolError(Exception):
    """Base class of errors that the user can correct. The user sees the message unchanged."""

    exit_code = 1


class PromptError(HdtoolError):
    """Raised when a prompt or a file of prompts cannot be used."""


class ContextError(PromptError):
    """Raised when a prompt leaves no room for an answer in the model's context."""

    def __init__(self, tokens: int, limit: int) -> None:
        self.found = f"the prompt is {tokens:,} tokens long, but the model's context holds {limit:,}, answer included"
        self.advice = "shorten it, or take a model with a longer context"
        super().__init__(f"{self.found}: {self.advice}")
        self.tokens, self.limit = tokens, limit


class ToolsError(PromptError):
    """Raised when tools are given and the model's chat template does not present them."""

    def __init__(self) -> None:
        super().__init__(
            "the model's chat template does not present tools, so the model would not see them: take a model that "
            "calls tools, such as Qwen3, or leave them out"
        )


class ModelError(HdtoolError):
    """Raised when a model does not exist, or cannot be loaded or used on this machine."""


class FamilyError(ModelError):
    """Raised when a model's architecture cannot verify draft trees."""


class RecordError(HdtoolError):
    """Raised when a builder's input or a recorded conversation cannot be used."""


class StoreError(HdtoolError):
    """Raised when a store cannot be opened or written."""


class HeadsError(HdtoolError):
    """Raised when drafting heads cannot be opened, trained or written."""


class CostError(HdtoolError):
    """Raised when a cost curve cannot be read or written."""


class ResultError(HdtoolError):
    """Raised when a folder of results cannot be read or written."""


class ServeError(HdtoolError):
    """Raised when a server cannot be started."""


class ClusterError(HdtoolError):
    """Raised when a cluster cannot be reached, or cannot run the build."""


class OptionError(HdtoolError):
    """Raised for an option with an invalid value, or for options that contradict each other."""

    exit_code = 2


def requirements(extra: str | None = None) -> list[Requirement]:
    """Return the requirements of hdtool, or those that an extra adds."""
    from packaging.requirements import Requirement

    needed = [Requirement(line) for line in metadata.requires("hdtool") or ()]
    if extra is None:
        return [each for each in needed if each.marker is None]
    return [each for each in needed if each.marker and each.marker.evaluate({"extra": extra})]


def pip_install(needed: Iterable[Requirement]) -> str:
    """Return a pip command that installs packages and can be run in any folder."""
    return " ".join(["pip install", *(f'"{each.name}{each.specifier}"' for each in needed)])


def install_command(extra: str) -> str:
    """Return a pip command that installs an extra's packages and can be run in any folder."""
    return pip_install(requirements(extra))


def command_for_missing(module: str | None) -> str | None:
    """Return the pip command that installs a module, or None if no package that hdtool needs has the module's name."""
    name = (module or "").partition(".")[0].replace("_", "-")
    return next((pip_install([each]) for each in requirements() if each.name == name), None)
