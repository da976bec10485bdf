"""Base class of the settings classes, and what their fields declare about themselves and their options."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import Field, asdict, dataclass, field, fields, replace
from enum import StrEnum
from typing import Any, ClassVar, TypeVar

from hdtool.data.errors import OptionError, did_you_mean

T = TypeVar("T")


class Panel(StrEnum):
    """Sections of a command's help, in the order shown."""

    ARGUMENTS = "Arguments"
    INPUT = "Input"
    SERVER = "Server"
    MODEL = "Model"
    HEADS = "Architecture of the heads"
    TRAINING = "Training"
    DRAFTING = "Drafting"
    SAMPLING = "Sampling"
    STRUCTURE = "Structured output"
    BUILD = "Build"
    MEASUREMENT = "Measurement"
    OUTPUT = "Output"
    OPTIONS = "Options"


NoEffect = Callable[[Mapping[str, Any]], object]
"""Takes the values of all options of a command, by name, and returns why an option has no effect with them, or else a
falsy value. Advice may follow a colon; without a colon, users are advised to leave the option out."""


@dataclass(frozen=True)
class Use:
    """Which users and methods need an option, and when it has no effect."""

    rare: bool = False
    """True if few users need it, so that only ``--help-all`` shows it where not all options fit on a screen."""
    methods: tuple[str, ...] = ()
    """Methods with which the option has an effect; empty if that does not depend on the method."""
    no_effect: NoEffect = lambda given: ""


ANY_USE, RARE = Use(), Use(rare=True)


def setting(
    default: T,
    help: str,
    *,
    option: str = "",
    alias: str = "",
    values: Iterable[str] = (),
    choices: Iterable[str] = (),
    min_value: int | None = None,
    max_value: int | None = None,
    panel: Panel | None = None,
    use: Use = ANY_USE,
) -> T:
    """Define a field of a settings class.

    ``option`` and ``alias`` name the command-line option if it differs from the field. ``values`` lists examples of
    accepted values, ``choices`` all of them; ``min_value`` and ``max_value`` bound a number, inclusively. ``panel``
    replaces that of the class. The first sentence of ``help`` is all that a short help shows.
    """
    described = {"help": help, "option": option, "alias": alias, "values": (*values, *choices), "panel": panel}
    limits = {"choices": (*choices,), "min_value": min_value, "max_value": max_value}
    return field(default=default, metadata={**described, **limits, "use": use})


def rare_setting(default: T, help: str, *, use: Use = ANY_USE, **declared: Any) -> T:
    """Define a field that few users need; see ``setting``."""
    return setting(default, help, use=replace(use, rare=True), **declared)


def option_of(config_field: Field[Any]) -> str:
    """Return the name of a setting's command-line option, with underscores instead of hyphens."""
    return config_field.metadata.get("option") or config_field.name


@dataclass(frozen=True)
class Settings:
    """Base class for settings; checks choices and bounds when an instance is created."""

    panel: ClassVar[Panel]
    """Where help shows the options of a settings class."""

    def __init_subclass__(cls, panel: Panel) -> None:
        cls.panel = panel

    def __post_init__(self) -> None:
        for config_field in fields(self):
            value, declared = getattr(self, config_field.name), config_field.metadata
            if value is None or not declared:
                continue
            choices, min_value, max_value = (declared[limit] for limit in ("choices", "min_value", "max_value"))
            expected = f"one of {', '.join(choices)}"
            require(not choices or value in choices, option_of(config_field), value, expected, choices)
            if min_value is not None:
                expected = f"{min_value} or more" if max_value is None else f"between {min_value} and {max_value}"
                fits = min_value <= value and (max_value is None or value <= max_value)
                require(fits, option_of(config_field), value, expected)


SETTINGS_WITHOUT_EFFECT = ("method", "out", "baseline", "limit", "per_task", "trust_remote_code")
"""Settings that are not recorded, so that a run can be resumed with other values of them."""


def recorded_settings(*parts: Settings) -> dict[str, Any]:
    """Return the settings as a file of results records them; only a run with equal settings is resumed.

    Later parts override earlier ones. Tuples are converted to lists, as JSON does.
    """
    settings = {name: value for part in parts for name, value in asdict(part).items()}
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in settings.items()
        if name not in SETTINGS_WITHOUT_EFFECT
    }


def require(holds: bool, name: str, value: object, expected: str, known: Collection[str] = ()) -> None:
    """Raise OptionError unless ``holds`` is True; the message names the option, its value and what was expected.

    If ``known`` lists accepted values, the message suggests one for the first unknown value in a comma-separated list.
    """
    if not holds:
        unknown = next((part for part in map(str.strip, str(value).split(",")) if part not in known), "")
        raise OptionError(f"--{name.replace('_', '-')} must be {expected}, got {value}{did_you_mean(unknown, known)}")
