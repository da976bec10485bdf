"""Compares hdtool with other CPU engines in one run: plain decoding and drafting of each.

    python -m tests.benchmarks.rivals --model smollm2 --questions question.jsonl --num-prompts-per-task 3 \\
        --llama-cpp-file Q4_0.gguf --llama-cpp-file Q8_0.gguf --llama-bench build/bin/llama-bench --openvino FOLDER
    python -m tests.benchmarks.rivals --model LARGE.gguf --drafter SMALL.gguf --methods hd pld drafter hd+drafter \\
        --questions coding.jsonl --llama-server build/bin/llama-server --no-generate

The engines are hdtool with activations in float32 and in int8, ``generate`` of transformers, llama.cpp through
``llama-cpp-python`` on the model's own GGUF file and on those of ``--llama-cpp-file``, its ``llama-bench`` on the same
files, its ``llama-server`` on the model's own, and OpenVINO GenAI on each ``--openvino``: a folder of ``optimum-cli
export openvino``, or a GGUF file. Engines that are not installed are listed and left out.

All contenders answer each question in turn, greedily and with fresh drafters, in one process (``llama-bench`` in a
separate one). Speeds are tokens per second of CPU time, which is robust against other processes, and of wall-clock
time, in the round of median speed of each question, averaged over questions. ``llama-bench`` gets the lengths of the
model's plain answers; its CPU time excludes its start. A second table leaves out prefill: decoding's share of the CPU
time is taken to be its share of the time.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean

import torch

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
from hdtool.builders.evaluation.scores import mean_speed
from hdtool.data import demo
from hdtool.data.answered_questions import AnsweredQuestion, AnsweredTurn
from hdtool.data.errors import HdtoolError
from hdtool.data.gguf_header import GGUFHeader
from hdtool.data.progress import progress_bar
from hdtool.data.prompts import Prompt, interleave_tasks, read_prompts, tasks_of
from hdtool.runtime.generation.grammar import Guide
from hdtool.runtime.kernels.machine_name import machine
from hdtool.runtime.settings.decoding import DecodeConfig, StoresConfig
from hdtool.runtime.settings.model import ACTIVATIONS, ModelConfig, SamplingConfig
from hdtool.runtime.target.load import Loaded, load
from hdtool.runtime.weights.gguf_file import gguf_file
from tests.benchmarks import openvino_peer
from tests.benchmarks.laboratory import Table, parser_of
from tests.benchmarks.llama_bench import LlamaBench
from tests.benchmarks.llama_server import LOOKUP as SERVER_LOOKUP, LlamaServerContender, draft_model_options
from tests.benchmarks.openvino_peer import OpenVinoContender

PLAIN, LOOKUP, DRAFT_MODEL, LLAMA_BENCH = "plain", "prompt lookup", "draft model", "llama-bench"


GENERATE = {"generate": PLAIN, "generate-pld": LOOKUP, "generate-assisted": DRAFT_MODEL}


@dataclass(frozen=True)
class TimedByBench:
    """Gives the answers of a contender, with the times that ``llama-bench`` takes for as many tokens."""

    bench: LlamaBench
    contender: Contender

    def fresh(self) -> TimedByBench:
        return replace(self, contender=self.contender.fresh())

    def answer(self, prompt: list[int], guide: Guide | None = None, prediction: Sequence[int] = ()) -> AnsweredTurn:
        turn = self.contender.answer(prompt, guide)
        seconds, cpu_seconds = self.bench.seconds(len(prompt), len(turn.output_ids))
        return replace(turn, seconds=seconds, cpu_seconds=cpu_seconds)


@dataclass
class Lineup:
    """Contenders of a run by engine and method, with notes and a line for each engine that is missing."""

    loaded: Loaded
    contenders: dict[tuple[str, str], Contender] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)


def entered(options: argparse.Namespace) -> Lineup:
    """Return the contenders of all engines that are installed."""
    model = ModelConfig(options.model, device="cpu", threads=options.threads)
    own = gguf_file(model)
    files = [*([own] if own else []), *options.llama_cpp_file]
    for file in options.llama_cpp_file:
        check_file(file)
    torch.set_num_threads(options.threads)
    lineup = _with_hdtool(model, options)
    for file in files:
        check_same_model(file, lineup.loaded)
    _add_llama_cpp(lineup, model, files, options)
    if own and options.llama_server:
        _add_llama_server(lineup, own, options)
    _add_openvino(lineup, options)
    return lineup


def _with_hdtool(model: ModelConfig, options: argparse.Namespace) -> Lineup:
    decoding = DecodeConfig(max_new_tokens=options.max_new_tokens, drafter=options.drafter)
    sampling = SamplingConfig()
    stores = StoresConfig(options.model_db, options.corpus_db)
    first: Lineup | None = None
    transformers: dict[str, Contender] = {}
    for activations in options.activations:
        config = replace(model, activations=activations)
        try:
            loaded = load(config)
        except HdtoolError as error:
            if first is None:
                raise
            first.missing.append(f"hdtool, {activations}: {error}")
            continue
        store_set = loaded.store_opener(stores).open()
        factory = ContenderFactory(loaded, store_set, config, decoding, sampling)
        if first is None:
            first = Lineup(loaded, notes=[f"hdtool drafts from {store_set}"])
            if options.generate:
                names = [name for name in GENERATE if options.drafter or name != "generate-assisted"]
                transformers = factory.contenders(names, options.drafter)
        for method, contender in factory.contenders(["ar", *options.methods]).items():
            first.contenders[f"hdtool, {activations}", PLAIN if method == "ar" else f"`{method}`"] = contender
    assert first is not None
    for name, contender in transformers.items():
        first.contenders["transformers' `generate`", GENERATE[name]] = contender
    return first


def _add_llama_cpp(lineup: Lineup, model: ModelConfig, files: Sequence[Path], options: argparse.Namespace) -> None:
    if not files:
        lineup.missing.append(f"llama.cpp: {model.name} is no GGUF file; name one of the model with --llama-cpp-file")
    named = {f"llama.cpp, {quantization_name(GGUFHeader.read(file))}": file for file in files}
    if reason := files and exclusion_reason("", {"": files[0]}, model, SamplingConfig()):
        lineup.missing.append(f"llama.cpp {reason}")
    elif files:
        lineup.notes += build_notes({BUILD_KEY: describe_build(named, on_gpu=False)})
        for engine, file in named.items():
            for method in (PLAIN, LOOKUP):
                lookup = method == LOOKUP
                contender = LlamaCppContender(lineup.loaded, file, options.max_new_tokens, lookup=lookup)
                lineup.contenders[engine, method] = contender
    if not options.llama_bench:
        lineup.missing.append("llama-bench: name the program of a build of llama.cpp with --llama-bench")
        return
    plain = next(iter(lineup.contenders.values()))
    for number, (engine, file) in enumerate(named.items()):
        bench = LlamaBench(options.llama_bench, file, options.threads)
        if not number:
            lineup.notes.append(f"llama-bench: {bench.build}")
        lineup.contenders[engine.replace("llama.cpp", LLAMA_BENCH), PLAIN] = TimedByBench(bench, plain)


def _add_llama_server(lineup: Lineup, file: Path, options: argparse.Namespace) -> None:
    drafts = {PLAIN: (), LOOKUP: SERVER_LOOKUP}
    if options.drafter:
        drafts[DRAFT_MODEL] = draft_model_options(Path(options.drafter), options.threads)
    for method, chosen in drafts.items():
        contender = LlamaServerContender(lineup.loaded, options.llama_server, file, options.max_new_tokens, *chosen)
        lineup.contenders[f"llama-server, {quantization_name(GGUFHeader.read(file))}", method] = contender


def _add_openvino(lineup: Lineup, options: argparse.Namespace) -> None:
    if not openvino_peer.is_installed():
        lineup.missing.append(
            f"OpenVINO GenAI needs {openvino_peer.PACKAGE}, not installed here: pip install {openvino_peer.PACKAGE}"
        )
        return
    if not options.openvino:
        lineup.missing.append("OpenVINO GenAI is installed; name a converted model or a GGUF file with --openvino")
        return
    lineup.notes.append(f"OpenVINO GenAI {openvino_peer.version()}")
    for place in options.openvino:
        for method in (PLAIN, LOOKUP):
            contender = OpenVinoContender(lineup.loaded, place, options.max_new_tokens, lookup=method == LOOKUP)
            lineup.contenders[f"OpenVINO, {place.name}", method] = contender


Answers = dict[tuple[str, str], list[AnsweredQuestion]]


def measure(lineup: Lineup, questions: Sequence[Prompt], options: argparse.Namespace) -> Answers:
    """Return all answers, after warming up every contender with the longest question."""
    names = {", ".join(name): name for name in lineup.contenders}
    contenders = {name: lineup.contenders[key] for name, key in names.items()}
    bench = Bench(lineup.loaded, contenders, options.max_new_tokens, rounds=options.rounds)
    bench.check(questions)
    bench.warm_up([max(questions, key=lambda question: sum(len(one["content"]) for one in question.messages))])
    answers: Answers = {key: [] for key in lineup.contenders}
    with progress_bar(len(questions), "questions", quiet=False) as shown:
        for by_name in bench.answers(questions):
            for name, answered in by_name.items():
                answers[names[name]].append(answered)
            shown.advance()
    return answers


def speed(answers: Sequence[AnsweredQuestion]) -> float:
    """Return tokens per CPU second, averaged over questions."""
    return fmean(sum(one.new_tokens) / sum(turn.cpu_seconds or 0.0 for turn in one.turns) for one in answers)


def decoding_speed(answers: Sequence[AnsweredQuestion]) -> float:
    """Return tokens after the first per CPU second of decoding, averaged over questions with more than one token."""
    turns = [[turn for turn in one.turns if len(turn.output_ids) > 1] for one in answers]
    return fmean(sum(len(turn.output_ids) - 1 for turn in of) / sum(map(decoding_seconds, of)) for of in turns if of)


def decoding_seconds(turn: AnsweredTurn) -> float:
    return (turn.cpu_seconds or 0.0) * (1 - (turn.first_seconds or 0.0) / turn.seconds)


def reading_share(answers: Sequence[AnsweredQuestion]) -> float:
    """Return the share of the time that passes before the first token."""
    turns = [turn for one in answers for turn in one.turns]
    return sum(turn.first_seconds or 0.0 for turn in turns) / sum(turn.seconds for turn in turns)


def show_decoding(answers: Answers, questions: Sequence[Prompt]) -> None:
    """Print a table of decoding without prefill: tokens per CPU second, and times the engine's plain decoding."""
    places = places_by_task(questions)
    table = Table("decoding alone, tokens per CPU second (times plain)", *places, "share of reading")
    for (engine, method), rows in answers.items():
        if engine.startswith(LLAMA_BENCH):
            continue
        cells = []
        for of in places.values():
            own, plain = (decoding_speed([found[place] for place in of]) for found in (rows, answers[engine, PLAIN]))
            cells.append(f"{own:.1f} ({own / plain:.2f})")
        table.row(f"{engine}, {method}", *cells, f"{reading_share(rows):.0%}")


def places_by_task(questions: Sequence[Prompt]) -> dict[str, list[int]]:
    """Map tasks, and "all" if there are several, to the places of their questions."""
    places: dict[str, list[int]] = {}
    for place, task in enumerate(tasks_of([one.category for one in questions])):
        places.setdefault(task or "all", []).append(place)
    return places | ({"all": list(range(len(questions)))} if len(places) > 1 else {})


def show(answers: Answers, questions: Sequence[Prompt]) -> None:
    """Print a table of speeds by task."""
    places = places_by_task(questions)
    wall, own = "by wall clock", "against its plain decoding"
    table = Table("tokens per CPU second", *places, wall, own, "tokens per step", "answers as plain")
    for (engine, method), rows in answers.items():
        plain = answers[engine, PLAIN]
        speeds = [*(speed([rows[place] for place in of]) for of in places.values()), mean_speed(rows)]
        cells = [*(f"{value:.1f}" for value in speeds), f"{speed(rows) / speed(plain):.2f}"]
        if not engine.startswith(LLAMA_BENCH):
            steps = [tokens for one in rows for tokens in one.step_tokens]
            equal = sum(one.output_ids == other.output_ids for one, other in zip(rows, plain, strict=True))
            cells += [f"{fmean(steps):.2f}", f"{equal} of {len(rows)}"]
        table.row(f"{engine}, {method}", *cells, *[""] * (len(places) + 4 - len(cells)))


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of(
        __doc__, model="smollm2", questions=demo.PROMPTS, num_prompts_per_task=1, max_new_tokens=128, rounds=3,
        threads=1, model_db=None, corpus_db=None,
    )  # fmt: skip
    parser.add_argument("--generate", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--llama-cpp-file", type=Path, action="append", default=[])
    parser.add_argument("--llama-bench", type=Path)
    parser.add_argument("--openvino", type=Path, action="append", default=[])
    parser.add_argument("--llama-server", type=Path)
    parser.add_argument("--drafter")
    parser.add_argument("--methods", nargs="+", default=["hd"])
    parser.add_argument("--activations", nargs="+", choices=ACTIVATIONS, default=ACTIVATIONS)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parsed(arguments)
    try:
        questions = interleave_tasks(read_prompts(options.questions), options.num_prompts_per_task)
        lineup = entered(options)
        for line in lineup.missing:
            print(f"missing: {line}", file=sys.stderr)
        answers = measure(lineup, questions, options)
    except HdtoolError as error:
        sys.exit(f"error: {error}")
    show(answers, questions)
    print()
    show_decoding(answers, questions)
    size = f"{len(questions)} questions, {options.max_new_tokens} tokens each, median of {options.rounds}"
    lines = [f"{machine()}, threads: {options.threads}; {size}", *lineup.notes]
    lines += [f"Not measured: {line}" for line in lineup.missing]
    print("", *(f"- {line}" for line in lines), sep="\n")


if __name__ == "__main__":
    main()
