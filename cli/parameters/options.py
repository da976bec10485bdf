"""Options that several commands share; their defaults are read from the runtime's settings."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hdtool.cli.parameters.command import BUILD, DRAFTING, INPUT, MODEL, OUTPUT, SAMPLING, option
from hdtool.runtime.config import (
    DEVICE_MAPS,
    DEVICES,
    DTYPES,
    ENGINES,
    LARGEST_BUDGET,
    METHODS,
    QUANTIZATIONS,
    SOURCE_NAMES,
    TREES,
    DecodeConfig,
    ReplayConfig,
)

INTERRUPTED = 130
"""The exit code that shells use for a program ended by Ctrl-C."""


ALL_SOURCES, STORE_SOURCES, ORDER = (
    ",".join(SOURCE_NAMES[letter] for letter in letters)
    for letters in (DecodeConfig.use, ReplayConfig.use, DecodeConfig.order)
)
"""The defaults by name."""
STORES = tuple(STORE_SOURCES.split(","))

# Input
Prompt = Annotated[str | None, option(INPUT, "Text to answer. Default: --prompts or standard input.")]
Prompts = Annotated[Path | None, option(INPUT, "File of prompts, one per line: text, or JSON with prompt or messages.")]
Chat = Annotated[
    bool | None,
    option(INPUT, "Apply the model's chat template or not. Default: if it has one.", "--chat/--raw"),
]
Inputs = Annotated[
    list[str],
    typer.Argument(help="Files, folders or globs: ShareGPT JSON, chat or plain JSONL, text, Parquet; also as .gz."),
]
StoreFolder = Annotated[Path, typer.Argument(metavar="STORE", help="Folder of a store.")]
MaxBadFraction = Annotated[float, option(INPUT, "Share of records that may be unusable; they are counted and named.")]

# Model
Model = Annotated[
    str | None, option(MODEL, "Folder or hub name of a decoder-only transformers model. Default: the demo model.")
]
Tokenizer = Annotated[
    str | None,
    option(MODEL, "Model that the store is for; only its tokenizer is read. Default: the demo model.", "--model"),
]
Device = Annotated[str, option(MODEL, f"Device: {', '.join(DEVICES)} or cuda:N.", values=DEVICES)]
DeviceMap = Annotated[
    str | None,
    option(MODEL, f"Spread the model over all GPUs: {', '.join(DEVICE_MAPS)}.", values=DEVICE_MAPS),
]
Quantization = Annotated[
    str | None,
    option(
        MODEL,
        f"Quantize the weights on loading: {', '.join(QUANTIZATIONS)} (torchao, bitsandbytes). Default: none.",
        values=QUANTIZATIONS,
    ),
]
DType = Annotated[
    str,
    option(
        MODEL, f"{', '.join(DTYPES)}. auto: float32 on CPUs, else that of the checkpoint.", "--dtype", values=DTYPES
    ),
]
Threads = Annotated[int | None, option(MODEL, "CPU threads of torch. Default: the fastest number, as measured.")]
TrustRemoteCode = Annotated[bool, option(MODEL, "Run code that comes with the model.", "--trust-remote-code")]
GenerationConfig = Annotated[
    str | None,
    option(SAMPLING, "A generation_config.json or its folder instead of the model's; none: the library's defaults."),
]

# Drafting
Method = Annotated[
    str,
    option(
        DRAFTING,
        "Drafting method: " + "; ".join(f"{name}, {method.description}" for name, method in METHODS.items()) + ".",
        values=METHODS,
    ),
]
ModelDb = Annotated[
    str | None, option(DRAFTING, "Folder of a model store, or none. Default: that of this tokenizer in hdtool's home.")
]
CorpusDb = Annotated[
    str | None, option(DRAFTING, "Folder of a corpus index, or none. Default: that of this tokenizer in hdtool's home.")
]
DraftTokens = Annotated[
    int | None,
    option(DRAFTING, f"Most draft tokens per step, 0 to {LARGEST_BUDGET}. Default: by the measured time of passes."),
]
Sources = Annotated[
    str,
    option(
        DRAFTING,
        f"Sources to draft from, with commas: {', '.join(SOURCE_NAMES.values())}; or their letters "
        f"{''.join(SOURCE_NAMES)}. A method ignores those that it does not have.",
        values=SOURCE_NAMES.values(),
    ),
]
StoreSources = Annotated[
    str,
    option(
        DRAFTING,
        f"Sources of hd and hd-paper, with commas: {', '.join(STORES)}; or letters.",
        "--sources",
        values=STORES,
    ),
]
Order = Annotated[
    str,
    option(DRAFTING, "Order in which hd-paper queries its sources: names or letters.", values=STORES),
]
Lookahead = Annotated[
    bool, option(DRAFTING, "Fill the context table of hd-paper by lookahead decoding.", "--lookahead/--no-lookahead")
]
Heads = Annotated[
    list[str] | None,
    option(DRAFTING, "Folder of trained heads, repeatable for several kinds. Default: those of the demo model."),
]
Tree = Annotated[
    str,
    option(
        DRAFTING,
        "Draft tree of medusa and amphista: dynamic, the most probable paths of each step, or static, as trained.",
        values=TREES,
    ),
]

# Sampling
MaxNewTokens = Annotated[int, option(SAMPLING, "Most tokens of an answer.")]
BatchSize = Annotated[
    int, option(SAMPLING, "Prompts answered in one batch (continuous batching); above 1 without streaming.")
]
Temperature = Annotated[float, option(SAMPLING, "Sampling temperature; 0 is greedy.")]
TopK = Annotated[
    int | None, option(SAMPLING, "Sample from the k most probable tokens; 0: from all. Default: the model's own.")
]
TopP = Annotated[
    float | None,
    option(SAMPLING, "Nucleus sampling: the most probable tokens up to this sum. Default: the model's own."),
]
RepetitionPenalty = Annotated[
    float | None, option(SAMPLING, "Penalty of tokens already seen; 1 is none. Default: the model's own.")
]
Seed = Annotated[int, option(SAMPLING, "Seed of sampling; the answer is the same for every method.")]

# Build
StoreOut = Annotated[
    Path | None, option(OUTPUT, "Folder of the store. Default: in hdtool's home, where generate finds it.", "--out")
]
Namespace = Annotated[
    str | None, option(OUTPUT, "Tenant of the store: the served model name under which hdtool serve finds it.")
]
Engine = Annotated[str, option(BUILD, f"Build backend: {', '.join(ENGINES)}. The store is the same.", values=ENGINES)]
Address = Annotated[
    str | None, option(BUILD, "HOST:PORT of a Ray cluster. Default: Ray starts workers on this machine.")
]

# Output
Stats = Annotated[bool, option(OUTPUT, "Print time, steps and sources of each answer to standard error.", "--stats")]
Color = Annotated[
    bool,
    option(OUTPUT, "Colour tokens by source in a terminal; NO_COLOR and FORCE_COLOR are respected.", "--color"),
]
Json = Annotated[bool, option(OUTPUT, "Print one JSON object per answer and nothing else.", "--json")]
JsonObject = Annotated[bool, option(OUTPUT, "Print one JSON object and nothing else.", "--json")]
Report = Annotated[Path | None, option(OUTPUT, "Folder for a page with tables and figures: index.html and PNG files.")]
Quiet = Annotated[bool, option(OUTPUT, "Show no progress bar.", "--quiet")]
