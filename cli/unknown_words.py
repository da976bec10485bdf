"""Messages for commands and options that hdtool does not have, with the ones that the user probably meant."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hdtool.cli.command import names_model
from hdtool.data.errors import did_you_mean
from hdtool.data.stores.store_file_names import printable

MAX_SHOWN = 80
"""Maximum number of characters of an unknown command that its message quotes."""

_CHAT = "hdtool chat MODEL holds a conversation, and hdtool generate MODEL PROMPT answers one prompt"
_DOWNLOAD = "hdtool downloads a model when a command first names it, as in hdtool chat OWNER/NAME"
_STORES = "hdtool stores lists the stores and what hdtool keeps of models"
_REMOVE = "hdtool stores remove NAME removes a store or what hdtool keeps of a model"
_SHOW = "hdtool inspect STORE shows a store, and hdtool doctor MODEL checks a model"
_BUILD = "hdtool build-model-db and hdtool build-corpus-db build stores, and hdtool setup MODEL --logs LOGS does both"
COMMANDS_ELSEWHERE = {
    **dict.fromkeys(("ask", "complete", "prompt", "run"), _CHAT),
    **dict.fromkeys(("download", "install", "pull"), _DOWNLOAD),
    **dict.fromkeys(("list", "ls", "models", "ps"), _STORES),
    **dict.fromkeys(("delete", "remove", "rm"), _REMOVE),
    **dict.fromkeys(("info", "show"), _SHOW),
    **dict.fromkeys(("build", "create", "index"), _BUILD),
    "help": "hdtool --help lists the commands, and hdtool COMMAND --help explains one",
    "version": "hdtool --version prints it",
}
"""Commands of similar tools, such as Ollama and llm, each with its counterpart in hdtool."""


def unknown_command(word: str, commands: Iterable[str]) -> str:
    """Return the message for a command line whose first argument is no command."""
    meant = ""
    if not (advice := COMMANDS_ELSEWHERE.get(word.lower())):
        if names_model(word):
            advice = f"it is a model, so hdtool chat {word}, or hdtool generate {word} PROMPT"
        elif len(word.split()) > 1:
            advice = "hdtool generate PROMPT answers a prompt"
        else:
            meant, advice = did_you_mean(word, commands), "hdtool --help lists the commands"
    return f"hdtool has no command {printable(word)[:MAX_SHOWN]}{meant}: {advice}"


def usage_message(error: Any) -> str:
    """Return the message for a usage error of typer, read from its attributes because typer's classes are private."""
    message = error.message if hasattr(error, "possibilities") else error.format_message()
    meant = did_you_mean(getattr(error, "option_name", ""), getattr(error, "possibilities", None) or ())
    command = getattr(error.ctx, "command_path", "hdtool")
    return f"{message.rstrip('.')}{meant}: see {command} --help"
