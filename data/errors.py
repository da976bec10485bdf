"""User-facing errors, and install hints for missing optional packages.

Each message is one line: what was wrong, what was found, what to do next. The command line prints it and exits with
``exit_code``. hdtool is on no package index, so hints name the packages of an extra and not the extra.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from packaging.requirements import Requirement


@contextmanager
def os_errors_as(error: type[HdtoolError], fault: str, advice: str) -> Iterator[None]:
    """Re-raise an ``OSError`` in this block as ``error``."""
    try:
        yield
    except OSError as cause:
        raise error(f"{fault} ({cause.strerror or cause}): {advice}") from cause


def error_reason(error: Exception) -> str:
    """The message of a library's error, in one line."""
    return str(error).strip().split("\n")[0] or type(error).__name__


class HdtoolError(Exception):
    """An error that the user can correct; its message is shown unchanged."""

    exit_code = 1


class PromptError(HdtoolError):
    """A prompt, or a file of prompts, cannot be used."""


class ContextError(PromptError):
    """A prompt leaves no room in the model's context."""

    def __init__(self, tokens: int, limit: int) -> None:
        self.found = f"the prompt is {tokens:,} tokens long, but the model's context holds {limit:,}, answer included"
        self.advice = "shorten it, or take a model with a longer context"
        super().__init__(f"{self.found}: {self.advice}")
        self.tokens, self.limit = tokens, limit


class ModelError(HdtoolError):
    """No such model, or none that can be loaded here."""


class FamilyError(ModelError):
    """The model is of a kind that cannot verify a tree of drafts."""


class RecordError(HdtoolError):
    """An input of a builder, or a recorded conversation, cannot be used."""


class StoreError(HdtoolError):
    """A store cannot be opened or written."""


class HeadsError(HdtoolError):
    """Drafting heads cannot be opened, trained or written."""


class CostError(HdtoolError):
    """A cost curve cannot be read or written."""


class ResultError(HdtoolError):
    """A folder of results cannot be read or written."""


class ServeError(HdtoolError):
    """The serving engine is not installed."""


class ClusterError(HdtoolError):
    """A cluster cannot be reached, or cannot do what it is asked for."""


class OptionError(HdtoolError):
    """Options that do not go together."""

    exit_code = 2


def extra_requirements(extra: str) -> list[Requirement]:
    """The requirements that an extra adds."""
    from packaging.requirements import Requirement

    needed = [Requirement(line) for line in metadata.requires("hdtool") or ()]
    return [each for each in needed if each.marker and each.marker.evaluate({"extra": extra})]


def install_command(extra: str) -> str:
    """The command that installs an extra, in any folder."""
    return " ".join(["pip install", *(f'"{each.name}{each.specifier}"' for each in extra_requirements(extra))])
