"""What the command line checks before libraries and models are loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hdtool.data.errors import OptionError

STORES = ("model_db", "corpus_db")
NO_STORE = "none"


def refuse_model_option(command: str, parameters: Sequence[Any], arguments: Sequence[str]) -> None:
    """Say so if the model is typed as an option where it is an argument."""
    takes_argument = any(one.name == "model" and one.param_type_name == "argument" for one in parameters)
    typed = list(arguments[: arguments.index("--")] if "--" in arguments else arguments)
    if takes_argument and any(word == "--model" or word.startswith("--model=") for word in typed):
        raise OptionError(f"{command} takes the model as an argument: {command} MODEL, without --model")


def require_stores(parameters: Mapping[str, Any]) -> None:
    """Raise StoreError if a store that was named is not there."""
    named = [value for name in STORES if isinstance(value := parameters.get(name), str) and value != NO_STORE]
    if named:
        from hdtool.data.stores.inventory import store_folder
        from hdtool.data.stores.store import read_manifest

        for name in named:
            read_manifest(store_folder(name))
