"""``hdtool collect``: the model's own answers to a file of prompts."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

from hdtool.cli import options
from hdtool.cli.command import INPUT_PANEL, OUTPUT_PANEL, option, with_structure
from hdtool.cli.options import only, without
from hdtool.data.progress import Tally, count_of
from hdtool.data.prompts import read_prompts
from hdtool.runtime.config import BuildConfig, DecodeConfig, GrammarConfig, ModelConfig, RecordingConfig, SamplingConfig


def collect(
    *,
    prompts: Annotated[
        Path,
        option(
            INPUT_PANEL, "File of prompts: text with one per line, or conversations in any form, as generate takes."
        ),
    ],
    out: Annotated[Path, option(OUTPUT_PANEL, "File of the answers; the same command resumes an interrupted run.")],
    chat: options.Chat = None,
    loading: Annotated[ModelConfig, without("device_map").as_argument()],
    decoding: Annotated[DecodeConfig, only("max_new_tokens", "batch_size", max_new_tokens=1024)],
    sampling: Annotated[SamplingConfig, without("stop")],
    structure: GrammarConfig,
    tools: options.Tools = None,
    recording: RecordingConfig,
    reading: Annotated[BuildConfig, only("max_bad_fraction")],
    quiet: options.Quiet = False,
) -> None:
    """Collect a model's answers for a model store.

    Writes one JSON line for each prompt: id, category, model, settings, messages, answers (ids, how each ended, and
    rankings if asked for), and the grammar if there is one.
    """
    tally = Tally()
    questions = with_structure(read_prompts(prompts, tolerance=reading.max_bad_fraction, tally=tally), structure, tools)

    from hdtool.builders.collect import GenerationFile
    from hdtool.builders.collect import collect as collected
    from hdtool.cli.answer_output import quiet_libraries
    from hdtool.cli.store_output import print_left_out
    from hdtool.data.progress import progress_bar
    from hdtool.runtime.answerer import Answerer

    quiet_libraries(quiet=quiet)
    print_left_out(tally)
    # A file that cannot be resumed is refused before the model is loaded.
    file = GenerationFile(out, loading, decoding, sampling, recording.rankings)
    file.check(questions)
    answerer = Answerer(loading, decoding, sampling, chat, rankings=recording.rankings)
    answerer.check(questions)
    with progress_bar(len(questions), "prompts", quiet=quiet) as shown:
        for answered in collected(answerer, questions, file):
            shown.to(answered)
    answers, tokens = file.counts()
    print(f"{out}: {count_of(answers, 'answer')}, {count_of(tokens, 'token')}", file=sys.stderr)
    print(f"next: {_build_command(loading, out)}", file=sys.stderr)


def _build_command(loading: ModelConfig, answers: Path) -> str:
    """The command that makes a model store of the answers."""
    command = ["hdtool", "build-model-db"]
    if loading.model:
        command += ["--model", loading.model]
    if loading.gguf_file:
        command += ["--gguf-file", loading.gguf_file]
    if loading.revision:
        command += ["--revision", loading.revision]
    if loading.trust_remote_code:
        command.append("--trust-remote-code")
    return shlex.join([*command, "--from", str(answers)])
