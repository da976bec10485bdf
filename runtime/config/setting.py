"""A setting: its default, what it does, the name of its option, and the values that it takes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import Field, dataclass, field, fields
from typing import Any, TypeVar

from hdtool.data.errors import OptionError

T = TypeVar("T")


def setting(
    default: T,
    help: str,
    *,
    option: str = "",
    alias: str = "",
    values: Iterable[str] = (),
    choices: Iterable[str] = (),
    least: int | None = None,
    most: int | None = None,
) -> T:
    """A field of a settings class.

    ``option`` and ``alias`` name its option if the field has another name. ``values`` are some that it takes, and
    ``choices`` are all of them; ``least`` is the smallest number, and ``most`` the largest one.
    """
    described = {"help": help, "option": option, "alias": alias, "values": (*values, *choices)}
    return field(default=default, metadata={**described, "choices": (*choices,), "least": least, "most": most})


def option_of(one: Field[Any]) -> str:
    """The name of a setting in the command line, with underscores."""
    return one.metadata.get("option") or one.name


@dataclass(frozen=True)
class Settings:
    """The base of settings classes."""

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if value is None or not one.metadata:
                continue
            choices, least, most = (one.metadata[limit] for limit in ("choices", "least", "most"))
            require(not choices or value in choices, option_of(one), value, f"one of {', '.join(choices)}")
            if least is not None:
                expected = f"{least} or more" if most is None else f"between {least} and {most}"
                require(least <= value and (most is None or value <= most), option_of(one), value, expected)


def require(holds: bool, name: str, found: object, expected: str) -> None:
    """Refuse a setting by the name of its option, with what was expected and found."""
    if not holds:
        raise OptionError(f"--{name.replace('_', '-')} must be {expected}, got {found}")
