"""Define the options that several commands share, and turn settings classes into options."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from functools import cache
from operator import getitem
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import typer

from hdtool.cli.command import HELP_ALL, MODEL_ARGUMENT, Option, help_all, method_names, model_argument
from hdtool.data.errors import OptionError
from hdtool.runtime.settings.decoding import HIERARCHIES
from hdtool.runtime.settings.draft_sources import SOURCE_NAMES
from hdtool.runtime.settings.model import ModelConfig
from hdtool.runtime.settings.settings_base import RARE, NoEffect, Panel, Settings, Use, option_of

T = TypeVar("T")
_types = cache(get_type_hints)


@dataclass(frozen=True)
class SelectedOptions:
    """Subset of a settings class's options that a command offers."""

    names: tuple[str, ...] = ()
    """Options to offer, in this order; empty means all."""
    left_out: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Defaults, by option, that replace the defaults of the settings class."""
    helps: Mapping[str, Any] = field(default_factory=dict)
    """Help texts, or whole typer options, by option, that replace the help texts of the settings class."""
    is_argument: bool = False
    """True if the command also accepts the model as its first argument, without ``--model``."""
    no_effect: NoEffect = Use.no_effect
    """Function that says when these options have no effect, except those in ``still_used``."""
    still_used: tuple[str, ...] = ()

    def described(self, **helps: Any) -> SelectedOptions:
        return replace(self, helps=helps)

    def as_argument(self) -> SelectedOptions:
        """Also accept the model as the first argument: ``hdtool chat MODEL`` or ``hdtool chat --model MODEL``."""
        return replace(self, is_argument=True)

    def without_effect(self, no_effect: NoEffect, *still_used: str) -> SelectedOptions:
        """Declare when these options have no effect, except those in ``still_used``."""
        return replace(self, no_effect=no_effect, still_used=still_used)

    def use(self, name: str, declared: Use) -> Use:
        """Return ``declared``, the use of an option, with ``no_effect`` added unless ``name`` is in ``still_used``."""
        if name in self.still_used:
            return declared
        return replace(declared, no_effect=lambda given: declared.no_effect(given) or self.no_effect(given))


def only(*names: str, **defaults: Any) -> SelectedOptions:
    """Select only these options, in this order, with these ``defaults`` in place of those of the settings."""
    return SelectedOptions(names, defaults=defaults)


def without(*names: str, **defaults: Any) -> SelectedOptions:
    """Select all options except these, with these ``defaults`` in place of those of the settings."""
    return SelectedOptions(left_out=names, defaults=defaults)


def with_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` as a command: options for the selected fields replace each parameter of a settings type.

    The returned function takes the options, creates the settings from them, and calls ``function``.
    """
    parameters: list[inspect.Parameter] = []
    groups: dict[str, tuple[type[Settings], dict[str, Field[Any]]]] = {}
    for parameter in inspect.signature(function, eval_str=True).parameters.values():
        annotation = parameter.annotation
        kind, *markers = get_args(annotation) if get_origin(annotation) is Annotated else (annotation,)
        if not isinstance(kind, type) or not issubclass(kind, Settings):
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        chosen: SelectedOptions = markers[0] if markers else SelectedOptions()
        known = {option_of(one): one for one in fields(kind) if one.metadata or one.name in chosen.helps}
        names = [name for name in chosen.names or known if name not in chosen.left_out]
        groups[parameter.name] = kind, {name: known[name] for name in names}
        parameters += [_parameter(kind, name, known[name], chosen) for name in names]
        if chosen.is_argument:
            parameters.insert(0, model_argument())
    parameters.append(help_all())

    def command(**given: Any) -> Any:
        for name in (MODEL_ARGUMENT, HELP_ALL):  # Command has already handled them
            given.pop(name, None)
        for name, (kind, taken) in groups.items():
            values = {one.name: given.pop(option) for option, one in taken.items()}
            given[name] = kind(**{field: _value(field, value) for field, value in values.items() if value is not None})
        return function(**given)

    command.__doc__ = function.__doc__
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return command


def _parameter(settings: type[Settings], name: str, one: Field[Any], chosen: SelectedOptions) -> inspect.Parameter:
    kind = _types(settings)[one.name]  # type: ignore[arg-type]  # classes are hashable
    default = chosen.defaults.get(name, inspect.Parameter.empty if one.default is MISSING else one.default)
    if any(get_origin(part) is tuple for part in (kind, *get_args(kind))):
        kind, default = list[str] | None, None
    if name in ("sources", "order"):
        default = ",".join(SOURCE_NAMES[letter] for letter in default)
    shown = chosen.helps.get(name, one.metadata.get("help"))
    if isinstance(shown, str):
        flags = [f"--{part.replace('_', '-')}" for part in (name, one.metadata["alias"]) if part]
        panel, use = one.metadata["panel"] or settings.panel, chosen.use(name, one.metadata["use"])
        names = flags if default is False or len(flags) > 1 else []
        shown = Option(panel, shown, *names, values=one.metadata["values"], use=use)
    annotation = getitem(Annotated, (kind, shown))
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _value(name: str, given: Any) -> Any:
    return method_names(given) if name == "methods" else tuple(given) if isinstance(given, list) else given


def parse_numbers(name: str, listed: str | None, kind: Callable[[str], T], expected: str) -> tuple[T, ...] | None:
    """Parse an option of comma-separated numbers, or raise OptionError; return None if the option was not given."""
    try:
        return None if listed is None else tuple(map(kind, listed.split(",")))
    except ValueError:
        raise OptionError(f"--{name} must be {expected}, got {listed}") from None


INTERRUPTED_EXIT = 130
"""Exit code that shells use for a program ended by Ctrl-C."""

PromptText = Annotated[
    str | None,
    typer.Argument(
        metavar="PROMPT",
        rich_help_panel=Panel.INPUT,
        help="Prompt to answer; MODEL before it is optional. - reads standard input, the default without --prompts.",
    ),
]
PromptOption = Annotated[str | None, Option(Panel.INPUT, "Text to answer, which may begin with a dash.")]
System = Annotated[str | None, Option(Panel.INPUT, "System message before the conversation.")]
Prompts = Annotated[
    Path | None, Option(Panel.INPUT, "File of prompts, or of conversations in any form. Text has one on each line.")
]
Prediction = Annotated[
    Path | None,
    Option(
        Panel.INPUT,
        "File with what the answer will probably look like; hdtool drafts from it, but it is not part of the prompt.",
        use=Use(
            rare=True,
            methods=HIERARCHIES,
            no_effect=lambda given: given["draft_tokens"] == 0 and "with --draft-tokens 0",
        ),
    ),
]
Tools = Annotated[
    Path | None,
    Option(Panel.STRUCTURE, "JSON file of tools as in OpenAI's API; the chat template presents them.", use=RARE),
]
Chat = Annotated[
    bool | None,
    Option(Panel.INPUT, "Apply the model's chat template or not. Default: if it has one.", "--chat/--raw", use=RARE),
]
_INPUT_FORMS = (
    "Files, folders, globs or hf:OWNER/NAME. Chats, ShareGPT, logs of OpenAI's API, vLLM, llama-server, llm; Parquet, "
    "text; also as .gz and .zst."
)
Inputs = Annotated[list[str], typer.Argument(help=_INPUT_FORMS)]
OptionalInputs = Annotated[list[str] | None, typer.Argument(help=_INPUT_FORMS)]
Rankings = Annotated[
    bool,
    Option(
        Panel.INPUT,
        "Add the tokens that the model ranks highest. After each token of its vocabulary: loads the model, and takes a "
        "pass for each 256 tokens. Needs no answers.",
        "--rankings",
    ),
]


def store_by_name(name: str) -> Path:
    """Return the folder of a store that is given by its path or by its name in hdtool's home."""
    from hdtool.data.stores.stores_at_home import store_folder

    return store_folder(name)


StoreFolder = Annotated[
    Path, typer.Argument(metavar="STORE", parser=store_by_name, help="Folder of a store, or its name in hdtool stores.")
]
StoreOut = Annotated[
    Path | None,
    Option(Panel.OUTPUT, "Folder of the store. Default: in hdtool's home, where generate finds it.", "--out"),
]
Replace = Annotated[bool, Option(Panel.OUTPUT, "Replace the store that is there.", "--replace")]
Namespace = Annotated[
    str | None,
    Option(
        Panel.OUTPUT,
        "Namespace of the store: the name of the tenant, or in vLLM the served model name, for which hdtool serve "
        "finds it.",
        use=Use(rare=True, no_effect=lambda given: given["out"] is not None and "with --out, which names the folder"),
    ),
]
ShowStats = Annotated[
    bool,
    Option(
        Panel.OUTPUT,
        "Print time, steps and sources of each answer. Also what computes the passes; to standard error.",
        "--stats",
    ),
]
ShowDrafts = Annotated[
    bool,
    Option(
        Panel.OUTPUT,
        "Colour drafted tokens by source in a terminal. NO_COLOR and FORCE_COLOR are respected.",
        "--show-drafts",
        "--color",
        use=Use(no_effect=lambda given: given.get("as_json") and "with --json"),
    ),
]
Json = Annotated[bool, Option(Panel.OUTPUT, "Print one JSON object per answer and nothing else.", "--json")]
JsonObject = Annotated[bool, Option(Panel.OUTPUT, "Print one JSON object and nothing else.", "--json")]
Report = Annotated[
    Path | None, Option(Panel.OUTPUT, "Folder for a page with tables and figures. It holds index.html and PNG files.")
]
Quiet = Annotated[bool, Option(Panel.OUTPUT, "Show no progress bar.", "--quiet", use=RARE)]

# For commands that usually read the tokenizer only
_TOKENIZER = only("model", "gguf_file", "revision", "trust_remote_code").described(
    model="Model that the store is for. Often its tokenizer alone is read. Default: the demo model."
)
Tokenizer = Annotated[ModelConfig, _TOKENIZER]
TOKENIZER_OF_STORE = _TOKENIZER.described(
    model="Model that the store is for. Default: one on this machine that has the store's tokenizer."
)
ModelOfStore = Annotated[ModelConfig, _TOKENIZER.as_argument()]
REQUIRED_MODEL_HELP = "Folder or hub name of a model, or a GGUF file. Or one of the demo: smollm2 or embedded."
ANSWERING_MODEL_HELP = "Model that answered; only its tokenizer is read. Default: the demo model."
