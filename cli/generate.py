"""``hdtool generate`` and ``hdtool collect``: answer prompts, and print the answers or write them to a file."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

from hdtool.cli import options_from_settings as options
from hdtool.cli.command import Option, quiet_libraries, with_structure
from hdtool.cli.options_from_settings import INTERRUPTED_EXIT, only, without
from hdtool.data.chat import with_system
from hdtool.data.errors import OptionError, PromptError
from hdtool.data.notes import tell
from hdtool.data.progress import count_of
from hdtool.data.prompts import Prompt, read_prediction, read_prompts
from hdtool.data.record_counts import Tally
from hdtool.runtime.settings.building import BuildConfig
from hdtool.runtime.settings.decoding import DecodeConfig, GrammarConfig, RecordingConfig, StoresConfig
from hdtool.runtime.settings.model import ModelConfig, SamplingConfig
from hdtool.runtime.settings.settings_base import Panel


def collect(
    *,
    prompts: Annotated[Path, Option(Panel.INPUT, "File of prompts, as generate takes it.")],
    out: Annotated[Path, Option(Panel.OUTPUT, "File of the answers. The same command resumes an interrupted run.")],
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

    from hdtool.builders.collect import GenerationFile, RankingRecorder, collect as collected
    from hdtool.cli.store_output import print_left_out
    from hdtool.data.progress import progress_bar
    from hdtool.runtime.answering.answer_prompts import Answerer

    quiet_libraries(quiet=quiet)
    print_left_out(tally)
    # Reject a file that cannot be resumed before loading the model.
    file = GenerationFile(out, loading, decoding, sampling, chat, recording.rankings)
    file.check(questions)
    new_observer = partial(RankingRecorder, recording.rankings) if recording.rankings else None
    answerer = Answerer(loading, decoding, sampling, chat, new_observer=new_observer)
    answerer.check_prompts(questions)
    with progress_bar(len(questions), "prompts") as progress:
        for answered in collected(answerer, questions, file):
            progress.to(answered)
    answers, tokens = file.counts()
    tell(f"{out}: {count_of(answers, 'answer')}, {count_of(tokens, 'token')}")
    tell(f"next: {_build_command(loading, out)}")


def _build_command(loading: ModelConfig, answers: Path) -> str:
    """Return the command that builds a model store from the collected answers."""
    command = ["hdtool", "build-model-db"]
    if loading.model:
        command.append(loading.model)
    if loading.gguf_file:
        command += ["--gguf-file", loading.gguf_file]
    if loading.revision:
        command += ["--revision", loading.revision]
    if loading.trust_remote_code:
        command.append("--trust-remote-code")
    return shlex.join([*command, "--from", str(answers)])


def generate(
    *,
    text: options.PromptText = None,
    prompt: options.PromptOption = None,
    prompts: options.Prompts = None,
    prediction: options.Prediction = None,
    system: options.System = None,
    chat: options.Chat = None,
    decoding: DecodeConfig,
    stores: Annotated[StoresConfig, without("namespace")],
    sampling: SamplingConfig,
    structure: GrammarConfig,
    tools: options.Tools = None,
    loading: Annotated[ModelConfig, without().as_argument()],
    stats: options.ShowStats = False,
    show_drafts: options.ShowDrafts = False,
    as_json: options.Json = False,
) -> int:
    """Answer prompts with a language model.

    Drafting changes the speed of answers, not their text. Several devices:
    torchrun --nproc-per-node 2 --no-python hdtool generate ...
    """
    predicted = read_prediction(prediction) if prediction is not None else ""
    questions = [
        replace(question, prediction=question.prediction or predicted)
        for question in _given_prompts(text, prompt, prompts)
    ]
    questions = with_structure(questions, structure, tools)
    if system is not None:
        questions = [with_system(question, system) for question in questions]

    from hdtool.cli.answer_output import (
        answer_record,
        answer_summary,
        batch_summary,
        colors_shown,
        legend,
        numbered,
        passes_summary,
        print_stores,
        stream_answer,
    )
    from hdtool.runtime.answering.answer_prompts import Answerer
    from hdtool.runtime.settings.draft_sources import SourceId

    quiet_libraries()
    answerer = Answerer(loading, decoding, sampling, chat, stores)
    answerer.check_prompts(questions)
    if loading.model is None:
        tell('answering with the embedded toy model: hdtool generate MODEL "..." names another')
    print_stores(answerer.store_set)
    if stats:
        tell(passes_summary(answerer.loaded.target))
    color = show_drafts and colors_shown()
    started, tokens, interrupted = time.perf_counter(), 0, False
    helped: set[SourceId] = set()
    for number, answer in numbered(answerer.all_answers(questions)):
        if len(questions) > 1 and not as_json:
            tell(f"── {number}/{len(questions)} {answer.prompt.id}")
        stream_answer(answer, show=not as_json, color=color)
        if as_json:
            print(json.dumps(answer_record(answer), ensure_ascii=False), flush=True)
        if stats or answer.interrupted:
            tell(answer_summary(answer.stats))
        tokens += answer.stats.tokens
        helped.update(answer.stats.that_helped)
        interrupted |= answer.interrupted
    if color and not as_json:
        tell(legend(sorted(helped)))
    if stats and decoding.batch_size > 1:
        tell(batch_summary(tokens, time.perf_counter() - started, decoding.batch_size))
    return INTERRUPTED_EXIT if interrupted else 0


def _given_prompts(text: str | None, prompt: str | None, prompts: Path | None) -> Sequence[Prompt]:
    if text == "-" and prompt is None and prompts is None:  # the usual name of standard input
        text = None
    given = {"a prompt": text, "--prompt": prompt, "--prompts": prompts}
    names = [name for name, value in given.items() if value is not None]
    if len(names) > 1:
        raise OptionError(f"{' and '.join(names)} exclude each other: give one of them")
    prompt = text if prompt is None else prompt
    if prompts is not None:
        return read_prompts(prompts)
    if prompt is not None:
        return [Prompt.from_text(prompt)]
    if sys.stdin is None or sys.stdin.isatty():
        raise OptionError("nothing to answer: give a prompt, --prompts FILE, or pipe a prompt in")
    try:
        text = sys.stdin.buffer.read().decode("utf-8-sig")
    except UnicodeDecodeError:
        raise PromptError("standard input is not UTF-8 text: pipe the prompt in as text") from None
    return [Prompt.from_text(text.rstrip("\n"), where="standard input")]
