"""Compares hdtool with other CPU engines in one run: plain decoding and drafting of each.

    python -m tests.benchmarks.rivals --model smollm2 --questions question.jsonl --num-prompts-per-task 3 \\
        --llama-cpp-file Q4_0.gguf --llama-cpp-file Q8_0.gguf --llama-bench build/bin/llama-bench --openvino FOLDER

The engines are hdtool with activations in float32 and in int8, ``generate`` of transformers, llama.cpp through
``llama-cpp-python`` on the model's own GGUF file and on those of ``--llama-cpp-file``, its ``llama-bench`` on the same
files, and OpenVINO GenAI on each ``--openvino``: a folder of ``optimum-cli export openvino``, or a GGUF file. Engines
that are not installed are listed and left out.

All contenders answer each question in turn, greedily and with fresh drafters, in one process (``llama-bench`` in a
separate one). Speeds are tokens per second of CPU time, which is robust against other processes, and of wall-clock
time: medians over rounds for each question, averaged over questions. ``llama-bench`` gets the lengths of the model's
plain answers; its CPU time excludes its start.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, median

from transformers.utils import logging

from hdtool.builders.evaluation.bench import Bench
from hdtool.builders.evaluation.bench_plan import ContenderFactory
from hdtool.builders.evaluation.contenders import Contender
from hdtool.builders.evaluation.llama_cpp_peer import (
    BUILD_KEY,
    LlamaCppContender,
    build_notes,
    check_file,
    check_same_model,
    describe_build,
    exclusion_reason,
    quantization_name,
)
from hdtool.builders.evaluation.threads import set_num_threads
from hdtool.data import demo
from hdtool.data.answered_questions import AnsweredQuestion, AnsweredTurn
from hdtool.data.errors import HdtoolError
from hdtool.data.gguf_header import GGUFHeader
from hdtool.data.progress import progress_bar
from hdtool.data.prompts import Prompt, interleave_tasks, read_prompts, tasks_of
from hdtool.runtime.config.decoding import DecodeConfig, StoresConfig
from hdtool.runtime.config.model import ACTIVATIONS, ModelConfig, SamplingConfig
from hdtool.runtime.generation.grammar import Guide
from hdtool.runtime.kernels.machine import machine
from hdtool.runtime.stores.store_set import StoreSet
from hdtool.runtime.target.load import Loaded, load
from hdtool.runtime.weights.gguf_file import gguf_file
from tests.benchmarks import openvino_peer
from tests.benchmarks.llama_bench import LlamaBench
from tests.benchmarks.openvino_peer import OpenVinoContender

PLAIN, LOOKUP = "plain", "prompt lookup"


@dataclass(frozen=True)
class Clocked:
    """Wraps a contender to record CPU time."""

    contender: Contender
    calls: list[tuple[int, int, float]] = field(default_factory=list)
    """Prompt tokens, answer tokens and CPU seconds of each answer since the last ``take_calls``."""

    def fresh(self) -> Clocked:
        return replace(self, contender=self.contender.fresh())

    def answer(self, prompt: list[int], guide: Guide | None = None, prediction: Sequence[int] = ()) -> AnsweredTurn:
        started = time.process_time()
        turn = self.contender.answer(prompt, guide, prediction)
        self.calls.append((len(prompt), len(turn.output_ids), time.process_time() - started))
        return turn

    def take_calls(self) -> list[tuple[int, int, float]]:
        calls = self.calls.copy()
        self.calls.clear()
        return calls


@dataclass
class Row:
    """Speeds of one method of one engine, by question and round."""

    engine: str
    method: str
    cpu: dict[str, list[float]] = field(default_factory=dict)
    wall: dict[str, list[float]] = field(default_factory=dict)
    tokens: int = 0
    steps: int = 0
    answers: dict[str, list[list[int]]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.engine}, {self.method}"

    def add(self, question: str, tokens: int, wall: float, cpu: float) -> None:
        self.wall.setdefault(question, []).append(tokens / wall)
        self.cpu.setdefault(question, []).append(tokens / cpu)

    def add_answer(self, question: str, answered: AnsweredQuestion, cpu: float) -> None:
        tokens = sum(answered.new_tokens)
        self.add(question, tokens, sum(turn.seconds for turn in answered.turns), cpu)
        self.tokens += tokens
        self.steps += len(answered.step_tokens)
        self.answers[question] = answered.output_ids


def speed(rounds: dict[str, list[float]], questions: Sequence[str]) -> float:
    """Return the mean over questions of the median over rounds."""
    return fmean(median(rounds[question]) for question in questions)


@dataclass
class Field:
    """Contenders of a run, with notes and a line for each engine that is missing."""

    loaded: Loaded
    contenders: dict[str, Clocked] = field(default_factory=dict)
    rows: dict[str, Row] = field(default_factory=dict)
    benches: dict[str, LlamaBench] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    def enter(self, engine: str, method: str, contender: Contender) -> None:
        row = Row(engine, method)
        self.rows[row.name] = row
        self.contenders[row.name] = Clocked(contender)

    def enter_bench(self, engine: str, bench: LlamaBench) -> None:
        row = Row(engine, PLAIN)
        self.rows[row.name] = row
        self.benches[row.name] = bench


def entered(options: argparse.Namespace) -> Field:
    """Load all engines that are installed."""
    model = ModelConfig(options.model, device="cpu", threads=options.threads)
    own = gguf_file(model)
    files = [*([own] if own else []), *options.llama_cpp_file]
    for file in options.llama_cpp_file:
        check_file(file)
    set_num_threads(options.threads)
    field_ = _with_hdtool(model, options)
    for file in files:
        check_same_model(file, field_.loaded)
    _add_llama_cpp(field_, model, files, options)
    _add_openvino(field_, options)
    return field_


def _with_hdtool(model: ModelConfig, options: argparse.Namespace) -> Field:
    decoding, sampling = DecodeConfig(max_new_tokens=options.max_new_tokens), SamplingConfig()
    stores = StoresConfig(options.model_db, options.corpus_db)
    first: Field | None = None
    transformers: dict[str, Contender] = {}
    for activations in ACTIVATIONS:
        config = replace(model, activations=activations)
        try:
            loaded = load(config)
        except HdtoolError as error:
            if first is None:
                raise
            first.missing.append(f"hdtool, {activations}: {error}")
            continue
        store_set = StoreSet.for_tokenizer(loaded.tokenizer, stores, model=loaded.checkpoint)
        lineup = ContenderFactory(loaded, store_set, config, decoding, sampling)
        if first is None:
            first = Field(loaded, notes=[f"hdtool drafts from {store_set}"])
            if options.generate:
                transformers = lineup.contenders(["generate", "generate-pld"])
        for method, contender in lineup.contenders(["ar", "hd"]).items():
            first.enter(f"hdtool, {activations}", PLAIN if method == "ar" else "`hd`", contender)
    assert first is not None
    for name, contender in transformers.items():
        first.enter("transformers' `generate`", PLAIN if name == "generate" else LOOKUP, contender)
    return first


def _add_llama_cpp(field_: Field, model: ModelConfig, files: Sequence[Path], options: argparse.Namespace) -> None:
    if not files:
        field_.missing.append(f"llama.cpp: {model.name} is no GGUF file; name one of the model with --llama-cpp-file")
    named = {f"llama.cpp, {quantization_name(GGUFHeader.read(file))}": file for file in files}
    if reason := files and exclusion_reason("", {"": files[0]}, model, SamplingConfig()):
        field_.missing.append(f"llama.cpp {reason}")
    elif files:
        field_.notes += build_notes({BUILD_KEY: describe_build(named, on_gpu=False)})
        for engine, file in named.items():
            for method in (PLAIN, LOOKUP):
                lookup = method == LOOKUP
                contender = LlamaCppContender(field_.loaded, file, options.max_new_tokens, lookup=lookup)
                field_.enter(engine, method, contender)
    if not options.llama_bench:
        field_.missing.append("llama-bench: name the program of a build of llama.cpp with --llama-bench")
        return
    for engine, file in named.items():
        bench = LlamaBench(options.llama_bench, file, options.threads)
        if not field_.benches:
            field_.notes.append(f"llama-bench: {bench.build}")
        field_.enter_bench(engine.replace("llama.cpp", "llama-bench"), bench)


def _add_openvino(field_: Field, options: argparse.Namespace) -> None:
    if not openvino_peer.is_installed():
        field_.missing.append(
            f"OpenVINO GenAI needs {openvino_peer.PACKAGE}, not installed here: pip install {openvino_peer.PACKAGE}"
        )
        return
    if not options.openvino:
        field_.missing.append("OpenVINO GenAI is installed; name a converted model or a GGUF file with --openvino")
        return
    field_.notes.append(f"OpenVINO GenAI {openvino_peer.version()}")
    for place in options.openvino:
        for method in (PLAIN, LOOKUP):
            contender = OpenVinoContender(field_.loaded, place, options.max_new_tokens, lookup=method == LOOKUP)
            field_.enter(f"OpenVINO, {place.name}", method, contender)


def measure(field_: Field, questions: Sequence[Prompt], options: argparse.Namespace) -> None:
    """Fill the rows, after warming up every contender with the longest question."""
    bench = Bench(field_.loaded, field_.contenders, options.max_new_tokens)
    bench.check(questions)
    bench.warm_up([max(questions, key=lambda question: sum(len(one["content"]) for one in question.messages))])
    for contender in field_.contenders.values():
        contender.take_calls()
    with progress_bar(options.rounds * len(questions), "questions", quiet=False) as shown:
        for number in range(options.rounds):
            for place, (question, answers) in enumerate(zip(questions, bench.answers(questions), strict=True)):
                calls = {name: contender.take_calls() for name, contender in field_.contenders.items()}
                for name, answered in answers.items():
                    field_.rows[name].add_answer(question.id, answered, sum(cpu for _, _, cpu in calls[name]))
                plain = calls[next(iter(field_.contenders))]
                for name, program in field_.benches.items():
                    spent = [program.seconds(prompt, answer) for prompt, answer, _ in plain]
                    wall, cpu = (sum(times) for times in zip(*spent, strict=True))
                    field_.rows[name].add(question.id, sum(answer for _, answer, _ in plain), wall, cpu)
                shown.to(number * len(questions) + place + 1)


def table(rows: Sequence[Row], questions: Sequence[Prompt]) -> Iterator[str]:
    """Yield the rows as a Markdown table, by task."""
    tasks: dict[str, list[str]] = {}
    for question, task in zip(questions, tasks_of([one.category for one in questions]), strict=True):
        tasks.setdefault(task or "all", []).append(question.id)
    every = [question.id for question in questions]
    columns = [*(tasks if len(tasks) > 1 else ()), "all", "by wall clock", "against its plain decoding"]
    heads = ["tokens per CPU second", *columns, "tokens per step", "answers as plain"]
    yield f"| {' | '.join(heads)} |"
    yield "|---" * len(heads) + "|"
    plain = {row.engine: row for row in rows if row.method == PLAIN}
    for row in rows:
        own = plain[row.engine]
        by_task = [speed(row.cpu, of) for of in tasks.values()] if len(tasks) > 1 else []
        overall = speed(row.cpu, every)
        cells = [f"{value:.1f}" for value in (*by_task, overall, speed(row.wall, every))]
        cells.append(f"{overall / speed(own.cpu, every):.2f}")
        if row.steps:
            equal = sum(row.answers[question] == own.answers[question] for question in every)
            cells += [f"{row.tokens / row.steps:.2f}", f"{equal} of {len(every)}"]
        else:
            cells += ["", ""]
        yield f"| {row.name} | {' | '.join(cells)} |"


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--questions", type=Path, default=demo.PROMPTS)
    parser.add_argument("--num-prompts-per-task", type=int, default=1)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--model-db")
    parser.add_argument("--corpus-db")
    parser.add_argument("--generate", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--llama-cpp-file", type=Path, action="append", default=[])
    parser.add_argument("--llama-bench", type=Path)
    parser.add_argument("--openvino", type=Path, action="append", default=[])
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parsed(arguments)
    logging.set_verbosity_error()
    try:
        questions = interleave_tasks(read_prompts(options.questions), options.num_prompts_per_task)
        field_ = entered(options)
        for line in field_.missing:
            print(f"missing: {line}", file=sys.stderr)
        measure(field_, questions, options)
    except HdtoolError as error:
        sys.exit(f"error: {error}")
    print("\n".join(table(list(field_.rows.values()), questions)))
    size = f"{len(questions)} questions, {options.max_new_tokens} tokens each, median of {options.rounds}"
    lines = [f"{machine()}, threads: {options.threads}; {size}", *field_.notes]
    lines += [f"Not measured: {line}" for line in field_.missing]
    print("", *(f"- {line}" for line in lines), sep="\n")


if __name__ == "__main__":
    main()
