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
import statistics
import time
from pathlib import Path

import torch
from transformers.utils import logging

from hdtool.data import demo
from hdtool.data.prompts import Prompt, interleave_tasks, read_prompts
from hdtool.runtime.answerer import Answerer
from hdtool.runtime.config.decoding import DecodeConfig
from hdtool.runtime.config.model import ACTIVATIONS, ModelConfig, SamplingConfig
from hdtool.runtime.kernels.machine import machine


def chosen_prompts(options: argparse.Namespace) -> list[Prompt]:
    if options.questions:
        prompts = interleave_tasks(list(read_prompts(options.questions)), options.prompts)
    else:
        prompts = list(read_prompts(demo.PROMPTS))
    return prompts[: options.prompts]


def said(answerer: Answerer, prompts: list[Prompt]) -> tuple[list[list[int]], float, float]:
    """Return the ids of all answers, tokens per second over all answers, and tokens per step."""
    answers = []
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    started = clock()
    for answer in answerer.all_answers(prompts):
        for _ in answer:
            pass
        answers.append(answer)
    seconds = clock() - started
    tokens = sum(answer.stats.tokens for answer in answers)
    steps = sum(answer.stats.steps for answer in answers)
    return [answer.output_ids for answer in answers], tokens / seconds, tokens / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--activations", choices=ACTIVATIONS, default="float32")
    parser.add_argument("--questions", type=Path, help="a file of prompts, as for `hdtool bench`")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--sizes", type=int, nargs="*", default=(1, 2, 4, 6, 8))
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--method", default="hd")
    options = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    prompts = chosen_prompts(options)
    method, methods = options.method, ("ar", options.method)
    run = f"{options.threads} threads, {len(prompts)} prompts, {options.rounds} rounds"
    print(f"{machine()}; {options.model}, {options.activations} activations, {run}\n")
    print(
        f"| batch | plain, tokens/s | {method}, tokens/s | speed-up | {method}, tokens per step | "
        "plain against batch 1 | differ |"
    )
    print("|---|---|---|---|---|---|---|")
    alone: list[list[int]] = []
    first = 0.0
    for size in sorted({1, *options.sizes}):
        answerers = {each: answering(each, size, options) for each in methods}
        speeds: dict[str, list[float]] = {each: [] for each in methods}
        per_step, differ = 0.0, 0
        for turn in range(options.rounds + 1):
            for each, answerer in answerers.items():
                ids, speed, per_step = said(answerer, prompts if turn else prompts[: 2 * size])
                if turn:
                    alone = alone or ids
                    differ += sum(found != plain for found, plain in zip(ids, alone, strict=True))
                    speeds[each].append(speed)
        plain, drafting = (statistics.median(speeds[each]) for each in methods)
        first = first or plain
        cells = f"{plain:.0f} | {drafting:.0f} | {drafting / plain:.2f} | {per_step:.2f} | {plain / first:.2f}"
        print(f"| {size} | {cells} | {differ} |", flush=True)


def answering(method: str, size: int, options: argparse.Namespace) -> Answerer:
    return Answerer(
        ModelConfig(options.model, device="cpu", threads=options.threads, activations=options.activations),
        DecodeConfig(method, options.tokens, batch_size=size, history="none"),  # all rounds have the same prompts
        SamplingConfig(),
    )


if __name__ == "__main__":
    main()
