"""``hdtool collect``: the model's own answers to a file of prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from hdtool.cli.parameters import options
from hdtool.cli.parameters.command import INPUT, OUTPUT, option
from hdtool.cli.parameters.settings import only, without
from hdtool.data.prompts import read_prompts
from hdtool.runtime.config import DecodeConfig, ModelConfig, SamplingConfig


def collect(
    *,
    prompts: Annotated[Path, option(INPUT, "File of prompts, one per line: text, or JSON as generate takes it.")],
    out: Annotated[Path, option(OUTPUT, "File of the answers; the same command resumes an interrupted run.")],
    chat: options.Chat = None,
    loading: Annotated[ModelConfig, without("device_map")],
    decoding: Annotated[DecodeConfig, only("max_new_tokens", "batch_size", max_new_tokens=1024)],
    sampling: SamplingConfig,
    quiet: options.Quiet = False,
) -> None:
    """Collect a model's answers for a model store.

    Writes one JSON line for each prompt: id, category, model, settings, messages, answers (ids and how each ended).
    """
    asked = read_prompts(prompts)

    from hdtool.builders.collect import GenerationFile
    from hdtool.builders.collect import collect as collected
    from hdtool.cli.output.show_answers import quiet_libraries
    from hdtool.data.progress import bar
    from hdtool.runtime.answerer import Answerer

    quiet_libraries(quiet=quiet)
    # A file that cannot be resumed is refused before the model is loaded.
    file = GenerationFile(out, loading, decoding, sampling)
    file.check(asked)
    answerer = Answerer(loading, decoding, sampling, chat)
    answerer.check(asked)
    with bar(len(asked), "answers", quiet=quiet) as shown:
        for answered in collected(answerer, asked, file):
            shown.to(answered)
