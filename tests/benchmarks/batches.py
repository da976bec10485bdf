"""Measures batched decoding on the embedded model: ``python -m tests.benchmarks.batches``.

For each batch size, plain decoding and ``hd`` (or another ``--method``) answer the same held-out prompts in turn, in
one process on the CPU, after a warm-up with the first prompts. The time is that of all answers including prefill: CPU
time with one thread, else wall-clock time; the median over rounds counts. Answers that differ from plain decoding at
batch size 1 are counted.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from transformers.utils import logging

from hdtool.data import demo
from hdtool.data.prompts import Prompt, read_prompts
from hdtool.runtime.answerer import Answerer
from hdtool.runtime.config import DecodeConfig, ModelConfig, SamplingConfig
from hdtool.runtime.environment import machine

MAX_NEW_TOKENS = 160
SIZES = (1, 2, 4, 6, 8)


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
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--method", default="hd")
    options = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    prompts = list(read_prompts(demo.PROMPTS))[: options.prompts]
    method, methods = options.method, ("ar", options.method)
    told = f"{options.threads} threads, {len(prompts)} prompts, {options.rounds} rounds"
    print(f"{machine()}; {told}\n")
    print(
        f"| batch | plain, tokens/s | {method}, tokens/s | speed-up | {method}, tokens per step | "
        "plain against batch 1 | differ |"
    )
    print("|---|---|---|---|---|---|---|")
    alone: list[list[int]] = []
    first = 0.0
    for size in SIZES:
        answerers = {each: answering(each, size, options.threads) for each in methods}
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


def answering(method: str, size: int, threads: int) -> Answerer:
    return Answerer(
        ModelConfig(device="cpu", threads=threads),
        DecodeConfig(method, MAX_NEW_TOKENS, batch_size=size, history="none"),  # all rounds have the same prompts
        SamplingConfig(),
    )


if __name__ == "__main__":
    main()
