"""Options that have no effect with what else was typed: they are refused by name."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from hdtool.data.errors import OptionError
from hdtool.runtime.config import LOWEST_TEMPERATURE, METHODS, OPTION_METHODS, PEERS, SHAPE_PEERS, ShapeConfig


class Conflict(NamedTuple):
    """An option without effect where another one has a value."""

    options: tuple[str, ...]
    others: tuple[str, ...]
    """The parameters that decide, together; commands without them are not concerned."""
    values: tuple[object, ...]
    """Values of the others with which the options have no effect; empty means any but None."""
    reason: str


PARTS_OF_AMPHISTA = ("auto_embedding", "positions", "adaptation", "sampled_token")
CONFLICTS = (
    Conflict(("prediction",), ("draft_tokens",), (0,), "with --draft-tokens 0"),
    Conflict(("color",), ("as_json",), (True,), "with --json"),
    Conflict(("history_prompts",), ("history",), ("none",), "with --history none"),
    Conflict(("namespace",), ("out",), (), "with --out, which names the folder"),
    Conflict(("model", "gguf_file", "trust_remote_code"), ("after", "ngrams"), (None,), "without --after or --ngrams"),
    Conflict(("medusa",), ("kind",), ("hydra", "hydra++", "mtp"), "with another --kind"),
    Conflict(
        (*PARTS_OF_AMPHISTA, "mlp", "head_layers"),
        ("medusa",),
        (True,),
        "with --medusa, whose heads have none of these parts",
    ),
    *(
        Conflict(parts, ("kind",), (kind,), f"with --kind {kind}, which does not choose this part")
        for kind, parts in {
            "amphista": ("head_layers",),
            "medusa": (*PARTS_OF_AMPHISTA, "mlp", "head_layers"),
            "hydra": (*PARTS_OF_AMPHISTA, "mlp"),
            "hydra++": PARTS_OF_AMPHISTA,
            "mtp": (*PARTS_OF_AMPHISTA, "lm_head_rank", "head_layers"),
        }.items()
    ),
    Conflict(("temperatures",), ("report",), (None,), "without --report"),
    Conflict(("address",), ("engine",), ("local",), "without --engine ray"),
)


def refuse_unused(typed: Collection[str], settings: Mapping[str, Any]) -> None:
    """Refuse the first of the typed options that would change nothing; ``none`` for a store is always allowed."""
    methods = _methods(settings)
    known = all(method in METHODS or method in PEERS or method in SHAPE_PEERS for method in methods)
    for option, users in OPTION_METHODS.items():
        if option in typed and settings[option] != "none" and methods and known and not set(methods) & set(users):
            _refuse(option, f"with method {', '.join(methods)} (it belongs to {', '.join(users)})")
    if "temperature" in settings and settings["temperature"] < LOWEST_TEMPERATURE and not settings.get("temperatures"):
        for option in ("top_k", "top_p"):
            if option in typed:
                _refuse(option, "with greedy decoding", "set --temperature above 0 or leave it out")
    for conflict in CONFLICTS:
        values = [settings[other] for other in conflict.others if other in settings]
        holds = all(one in conflict.values if conflict.values else one is not None for one in values)
        if holds and len(values) == len(conflict.others):
            for option in conflict.options:
                if option in typed:
                    _refuse(option, conflict.reason)


def _methods(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """The methods that will run; empty where all of them may."""
    if "method" in settings:
        return (settings["method"],)
    if listed := settings.get("methods"):
        return method_names(listed) or ()
    return ShapeConfig.methods if "shape" in settings and "methods" in settings else ()


def method_names(listed: Collection[str] | None) -> tuple[str, ...] | None:
    """The names in options that may be repeated and hold several with commas between them."""
    return tuple(name.strip() for names in listed for name in names.split(",")) if listed else None


def _refuse(option: str, reason: str, advice: str = "leave it out") -> None:
    raise OptionError(f"--{option.replace('_', '-')} has no effect {reason}: {advice}")
