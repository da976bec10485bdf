"""A setting: its default, what it does, the name of its option, and the values that it takes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import Field, dataclass, field, fields
from typing import Any, TypeVar

from hdtool.data.errors import OptionError

T = TypeVar("T")


def setting(
    default: T, help: str, *, option: str = "", alias: str = "", values: Iterable[str] = (), least: int | None = None
) -> T:
    """A field of a settings class.

    ``option`` and ``alias`` name its option if the field has another name, ``values`` are some that it takes, and
    ``least`` is the smallest number.
    """
    metadata = {"help": help, "option": option, "alias": alias, "values": tuple(values), "least": least}
    return field(default=default, metadata=metadata)


def option_of(one: Field[Any]) -> str:
    """The name of a setting in the command line, with underscores."""
    return one.metadata.get("option") or one.name


@dataclass(frozen=True)
class Settings:
    """The base of settings classes."""

    def __post_init__(self) -> None:
        for one in fields(self):
            value, least = getattr(self, one.name), one.metadata.get("least")
            if least is not None and value is not None:
                require(value >= least, option_of(one), value, f"{least} or more")


def require(holds: bool, name: str, found: object, expected: str) -> None:
    """Refuse a setting by the name of its option, with what was expected and found."""
    if not holds:
        raise OptionError(f"--{name.replace('_', '-')} must be {expected}, got {found}")
