"""Options that several commands share; their defaults are read from the runtime's settings."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hdtool.runtime.config import DEVICE_MAPS, DEVICES, DTYPES, ENGINES, LARGEST_BUDGET, METHODS, QUANTISATIONS

INTERRUPTED = 130
"""The exit code that shells use for a program ended by Ctrl-C."""

Model = Annotated[
    str | None,
    typer.Option(help="Folder or hub name of a decoder-only transformers model. Default: the embedded demo model."),
]
Method = Annotated[
    str,
    typer.Option(
        help="How tokens are drafted: " + "; ".join(f"{name}, {method.description}" for name, method in METHODS.items())
    ),
]
ModelDb = Annotated[
    str | None,
    typer.Option(help="Folder of a model store, or none. Default: the one in hdtool's home for this tokenizer."),
]
CorpusDb = Annotated[
    str | None,
    typer.Option(help="Folder of a corpus index, or none. Default: the one in hdtool's home for this tokenizer."),
]
Budget = Annotated[
    int | None,
    typer.Option(
        help=f"Draft nodes a step, 0 to {LARGEST_BUDGET}. Default: as many as pay, by measured forward passes."
    ),
]
Use = Annotated[
    str,
    typer.Option(
        help="Sources of hd, hd-paper and hd+logitspec, as far as they know them: C context table, M model store, "
        "S corpus, L last logit, K copied logits, R recycled logits."
    ),
]
DatabasesInUse = Annotated[
    str, typer.Option("--use", help="Databases that hd and hd-paper use: C context table, M model store, S corpus.")
]
Order = Annotated[str, typer.Option(help="In which hd-paper asks the databases.")]
Lookahead = Annotated[
    bool, typer.Option("--lookahead/--no-lookahead", help="Whether hd-paper feeds its context table by lookahead.")
]
MaxNewTokens = Annotated[int, typer.Option(help="Longest answer, in tokens.")]
BatchSize = Annotated[
    int,
    typer.Option(help="Prompts that are answered at once, in one pass for all; more than 1 do not stream."),
]
Temperature = Annotated[float, typer.Option(help="0 takes the likeliest token, more samples.")]
TopK = Annotated[
    int | None, typer.Option(help="Sample from the k likeliest tokens, 0 from all. Default: the model's own.")
]
TopP = Annotated[
    float | None,
    typer.Option(help="Sample from the likeliest tokens that hold this share. Default: the model's own."),
]
RepetitionPenalty = Annotated[
    float | None, typer.Option(help="Above 1 discourages tokens already seen. Default: the model's own.")
]
GenerationConfig = Annotated[
    str | None,
    typer.Option(
        help="A generation_config.json, or its folder, in place of the model's own; none: the library's defaults."
    ),
]
Seed = Annotated[int, typer.Option(help="Same seed, same answer: every draw is keyed by seed and position.")]
Device = Annotated[str, typer.Option(help=f"Where the model runs: {', '.join(DEVICES)} or cuda:N.")]
DeviceMap = Annotated[
    str | None,
    typer.Option(help=f"Spread a model over all GPUs of this machine: {', '.join(DEVICE_MAPS)}."),
]
Quantise = Annotated[
    str | None,
    typer.Option(
        help=f"Quantise the weights on loading: {', '.join(QUANTISATIONS)} (torchao's and bitsandbytes'). "
        "Default: as the checkpoint has them."
    ),
]
DType = Annotated[
    str, typer.Option("--dtype", help=f"{', '.join(DTYPES)}. auto: float32 on CPUs, else the checkpoint's own.")
]
Threads = Annotated[
    int | None, typer.Option(help="That torch computes with on a CPU. Default: as many as are fastest, as measured.")
]
TrustRemoteCode = Annotated[bool, typer.Option("--trust-remote-code", help="Run model code that comes with the model.")]
Prompt = Annotated[str | None, typer.Option(help="The text to answer. Without it, --prompts or standard input.")]
Prompts = Annotated[
    Path | None,
    typer.Option(help="A file of prompts, one a line: text, or JSON with prompt, messages or turns."),
]
Chat = Annotated[
    bool | None,
    typer.Option("--chat/--raw", help="Ask through the model's chat template, or as it stands. Default: chat if any."),
]
Heads = Annotated[
    list[str] | None,
    typer.Option(help="Folder of trained heads for amphista or medusa; may be given for each. Default: the demo's."),
]
Tree = Annotated[
    str, typer.Option(help="Of heads alone: dynamic, the likeliest paths of each step, or static, the trained tree.")
]
Stats = Annotated[bool, typer.Option("--stats", help="Tell on standard error what each answer took.")]
Color = Annotated[
    bool, typer.Option("--color", help="Show each token in the colour of the source that drafted it, with a legend.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object an answer, and nothing else.")]
JsonObject = Annotated[bool, typer.Option("--json", help="Print one JSON object, and nothing else.")]
Inputs = Annotated[
    list[str],
    typer.Argument(help="Files, folders or globs: ShareGPT JSON, chat or plain JSONL, text, Parquet; .gz on top."),
]
Tokenizer = Annotated[
    str | None,
    typer.Option("--model", help="The model whose tokenizer the store is for. Default: the embedded demo model."),
]
StoreOut = Annotated[
    Path | None,
    typer.Option("--out", help="The store's folder. Default: in hdtool's home, where generate finds it."),
]
Namespace = Annotated[
    str | None,
    typer.Option(
        help="Whose store it is: the name under which a server serves the model, where hdtool serve finds it."
    ),
]
Tolerate = Annotated[float, typer.Option(help="The share of records that may be unusable; they are counted and named.")]
Engine = Annotated[
    str, typer.Option(help=f"Who reads, tokenizes, counts and sorts: {', '.join(ENGINES)}. The store is the same.")
]
Address = Annotated[
    str | None,
    typer.Option(help="HOST:PORT of a Ray cluster's head. Default: Ray starts workers on this machine."),
]
StoreFolder = Annotated[Path, typer.Argument(metavar="STORE", help="The folder of a store.")]
Report = Annotated[
    Path | None, typer.Option(help="Folder for a page with tables and figures, index.html, and the figures as PNG.")
]
Quiet = Annotated[bool, typer.Option("--quiet", help="Show no progress bar.")]
