"""``hdtool export``: a model folder that drafts in any program that calls ``generate``."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from hdtool.cli.parameters import options
from hdtool.cli.parameters.command import OUTPUT, option
from hdtool.cli.parameters.settings import only, without
from hdtool.runtime.config import DecodeConfig, ModelConfig, StoresConfig


def export(
    *,
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Folder or hub name of the model, or a GGUF file.")],
    out: Annotated[Path, option(OUTPUT, "The new folder.")],
    loading: Annotated[ModelConfig, only("gguf_file", "revision")],
    decoding: Annotated[DecodeConfig, without("max_new_tokens", "batch_size")],
    store_set: Annotated[StoresConfig, without("namespace")],
    as_json: options.JsonObject = False,
) -> None:
    """Export a model folder whose generate drafts.

    The folder links to the files of the model and holds a custom_generate, which transformers uses when it loads the
    folder with trust_remote_code=True: from_pretrained, pipeline and transformers serve then draft with hdtool, from
    the stores that fit the model or that are named here.
    """
    from hdtool.builders.export import CODE
    from hdtool.builders.export import export as write
    from hdtool.cli.output.show_answers import quiet_libraries

    quiet_libraries()
    files = write(replace(loading, model=model), out, decoding, store_set)
    if as_json:
        print(json.dumps({"folder": str(out), "files": len(files), "code": CODE}, ensure_ascii=False))
        return
    print(f"{out}: links to {len(files)} files, and {CODE}")
    print(f'AutoModelForCausalLM.from_pretrained("{out}", trust_remote_code=True)', file=sys.stderr)
