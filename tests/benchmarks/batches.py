"""Measures batched decoding.

    python -m tests.benchmarks.batches
    python -m tests.benchmarks.batches --model smollm2 --questions question.jsonl --prompts 24 --sizes 1 8

For each batch size, plain decoding and ``hd`` (or another ``--method``) answer the same prompts in turn, in one process
on the CPU, after a warm-up with the first prompts. The time is that of all answers including prefill: CPU time with one
thread, else wall-clock time; the median over rounds counts. Answers that differ from plain decoding at batch size 1 are
counted. Without ``--questions``, which are taken from all tasks in turn, the prompts are the embedded model's held-out
ones.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median

from hdtool.builders.evaluation.experiment import DecodedTurn, Figures
from hdtool.builders.evaluation.timing import Stopwatch
from hdtool.data import demo
from hdtool.data.answered_questions import AnsweredTurn
from hdtool.data.prompts import Prompt, interleave_tasks, read_prompts
from hdtool.runtime.answering.answer_prompts import Answerer
from hdtool.runtime.kernels.machine_name import machine
from hdtool.runtime.settings.decoding import DecodeConfig
from hdtool.runtime.settings.model import ACTIVATIONS, ModelConfig, SamplingConfig
from tests.benchmarks.laboratory import Outcome, Table, parser_of


def chosen_prompts(options: argparse.Namespace) -> list[Prompt]:
    if options.questions:
        return interleave_tasks(read_prompts(Path(options.questions)), options.prompts)[: options.prompts]
    return read_prompts(demo.PROMPTS)[: options.prompts]


def answering(answerer: Answerer, prompts: Sequence[Prompt]) -> list[DecodedTurn]:
    """Answer all prompts; each answer gets an equal share of the total time."""
    answers = []
    with Stopwatch(answerer.loaded.target.device) as watch:
        for answer in answerer.all_answers(prompts):
            for _ in answer:
                pass
            answers.append(answer)
    seconds, cpu_seconds = (whole / len(answers) for whole in (watch.seconds, watch.cpu_seconds))
    return [
        DecodedTurn("", answer.output_ids, [], seconds, "", cpu_seconds=cpu_seconds, stats=answer.stats)
        for answer in answers
    ]


def main() -> None:
    parser = parser_of(
        __doc__, model="embedded", questions=None, prompts=32, sizes=[1, 2, 4, 6, 8], tokens=160, rounds=3, threads=2,
        method="hd",
    )  # fmt: skip
    parser.add_argument("--activations", choices=ACTIVATIONS, default="float32")
    options = parser.parse_args()
    prompts, methods = chosen_prompts(options), ("ar", options.method)
    run = f"{options.threads} threads, {len(prompts)} prompts, {options.rounds} rounds"
    print(f"{machine()}; {options.model}, {options.activations} activations, {run}\n")
    table = Table("batch", *(f"`{method}`, tokens/s" for method in methods), "speed-up", f"`{options.method}`, tokens "
                  "per step", "plain against batch 1", "differ")  # fmt: skip
    alone: list[list[int]] = []
    first = 0.0
    for size in sorted({1, *options.sizes}):
        answerers = {method: answerer_of(method, size, options) for method in methods}
        contenders = {
            method: lambda answerer=answerer: partial(answering, answerer) for method, answerer in answerers.items()
        }
        outcome = Outcome(contenders, [prompts], options.rounds, warm_up=[prompts[: 2 * size]])
        plain, drafting = (
            median(speed_of(row.turns, options.threads) for row in outcome.rows[method]) for method in methods
        )
        first, alone = first or plain, alone or outcome.rows["ar"][0].output_ids
        differ = sum(
            found != said
            for rows in outcome.rows.values()
            for row in rows
            for found, said in zip(row.output_ids, alone, strict=True)
        )
        per_step = outcome.totals[options.method].stats.tokens_per_step
        ratios = f"{drafting / plain:.2f}", f"{per_step:.2f}", f"{plain / first:.2f}"
        table.row(size, f"{plain:.0f}", f"{drafting:.0f}", *ratios, differ)


def speed_of(turns: Sequence[AnsweredTurn], threads: int) -> float:
    total = Figures.of(turns)
    return total.tokens_per_cpu_second if threads == 1 else total.tokens_per_second


def answerer_of(method: str, size: int, options: argparse.Namespace) -> Answerer:
    return Answerer(
        ModelConfig(options.model, device="cpu", threads=options.threads, activations=options.activations),
        DecodeConfig(method, options.tokens, batch_size=size, history="none"),  # all rounds have the same prompts
        SamplingConfig(),
    )


if __name__ == "__main__":
    main()
