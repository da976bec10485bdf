"""Options that several commands share, beside those of the runtime's settings."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hdtool.cli.parameters.command import INPUT, OUTPUT, STRUCTURE, option
from hdtool.cli.parameters.settings import only
from hdtool.runtime.config import ModelConfig

INTERRUPTED = 130
"""The exit code that shells use for a program ended by Ctrl-C."""

PromptText = Annotated[
    str | None,
    typer.Argument(
        metavar="PROMPT",
        help="Prompt to answer; MODEL before it is optional. - reads standard input, the default without --prompts.",
    ),
]
Prompt = Annotated[str | None, option(INPUT, "Text to answer, which may begin with a dash.")]
System = Annotated[str | None, option(INPUT, "System message before the conversation.")]
Prompts = Annotated[Path | None, option(INPUT, "File of prompts: text, one per line, or conversations in any form.")]
Prediction = Annotated[
    Path | None,
    option(
        INPUT, "File with what the answer will probably look like; hdtool drafts from it, and the model never reads it."
    ),
]
Tools = Annotated[
    Path | None, option(STRUCTURE, "JSON file of tools as in OpenAI's API; the chat template presents them.")
]
Chat = Annotated[
    bool | None, option(INPUT, "Apply the model's chat template or not. Default: if it has one.", "--chat/--raw")
]
_INPUT_FORMS = (
    "Files, folders, globs or hf:OWNER/NAME: chats, ShareGPT, logs of OpenAI's API, vLLM, llama-server, llm; Parquet, "
    "text; also as .gz and .zst."
)
Inputs = Annotated[list[str], typer.Argument(help=_INPUT_FORMS)]
OptionalInputs = Annotated[list[str] | None, typer.Argument(help=_INPUT_FORMS)]
Rankings = Annotated[
    bool,
    option(
        INPUT,
        "Add what the model ranks highest after each token of its vocabulary: loads the model, and takes a pass for "
        "each 256 tokens. Needs no answers.",
        "--rankings",
    ),
]


def store_of_name(name: str) -> Path:
    """A store by its folder or its name in hdtool's home."""
    from hdtool.data.stores.inventory import store_folder

    return store_folder(name)


StoreFolder = Annotated[
    Path, typer.Argument(metavar="STORE", parser=store_of_name, help="Folder of a store, or its name in hdtool stores.")
]
StoreOut = Annotated[
    Path | None, option(OUTPUT, "Folder of the store. Default: in hdtool's home, where generate finds it.", "--out")
]
Replace = Annotated[bool, option(OUTPUT, "Replace the store that is there.", "--replace")]
Namespace = Annotated[
    str | None,
    option(
        OUTPUT,
        "Namespace of the store: the name of the tenant, or in vLLM the served model name, for which hdtool serve "
        "finds it.",
    ),
]
Stats = Annotated[bool, option(OUTPUT, "Print time, steps and sources of each answer to standard error.", "--stats")]
Color = Annotated[
    bool, option(OUTPUT, "Colour tokens by source in a terminal; NO_COLOR and FORCE_COLOR are respected.", "--color")
]
Json = Annotated[bool, option(OUTPUT, "Print one JSON object per answer and nothing else.", "--json")]
JsonObject = Annotated[bool, option(OUTPUT, "Print one JSON object and nothing else.", "--json")]
Report = Annotated[Path | None, option(OUTPUT, "Folder for a page with tables and figures: index.html and PNG files.")]
Quiet = Annotated[bool, option(OUTPUT, "Show no progress bar.", "--quiet")]

# Models of which only the tokenizer is read
_TOKENIZER = only("model", "gguf_file", "revision", "trust_remote_code").described(
    model="Model that the store is for; often its tokenizer alone is read. Default: the demo model."
)
Tokenizer = Annotated[ModelConfig, _TOKENIZER]
ModelOfStore = Annotated[ModelConfig, _TOKENIZER.as_argument()]
REQUIRED_MODEL = "Folder or hub name of a decoder-only transformers model, a GGUF file, smollm2 or embedded."
THAT_ANSWERED = "Model that answered; only its tokenizer is read. Default: the demo model."
