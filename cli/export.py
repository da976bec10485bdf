"""``hdtool export``: a model folder that drafts in any program that calls ``generate``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

from hdtool.cli.parameters import options
from hdtool.cli.parameters.command import OUTPUT, option
from hdtool.cli.parameters.model_argument import require_model
from hdtool.cli.parameters.settings import only, without
from hdtool.runtime.config import DecodeConfig, ModelConfig, StoresConfig


def export(
    *,
    out: Annotated[Path, option(OUTPUT, "The new folder.")],
    loading: Annotated[
        ModelConfig,
        only("model", "gguf_file", "revision").described(model=options.REQUIRED_MODEL).as_argument(),
    ],
    decoding: Annotated[DecodeConfig, without("max_new_tokens", "batch_size")],
    store_set: Annotated[StoresConfig, without("namespace")],
    as_json: options.JsonObject = False,
) -> None:
    """Export a model folder whose generate drafts.

    The folder links to the files of the model and holds a custom_generate, which transformers uses when it loads the
    folder with trust_remote_code=True: from_pretrained, pipeline and transformers serve then draft with hdtool, from
    the stores that fit the model or that are named here.
    """
    require_model("export", loading.model)

    from hdtool.builders.export import CODE
    from hdtool.builders.export import export as write
    from hdtool.cli.output.show_answers import quiet_libraries

    quiet_libraries()
    files = write(loading, out, decoding, store_set)
    if as_json:
        print(json.dumps({"folder": str(out), "files": len(files), "code": CODE}, ensure_ascii=False))
        return
    print(f"{out}: links to {len(files)} files, and {CODE}")
    print(f'AutoModelForCausalLM.from_pretrained("{out}", trust_remote_code=True)', file=sys.stderr)
