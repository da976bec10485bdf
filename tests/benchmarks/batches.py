"""Several prompts at once on the embedded model: ``python -m tests.benchmarks.batches``.

For each size of batches, plain decoding and ``hd`` answer the same held-out prompts, one after the other in one
process, on the CPU; the first prompts are answered once before, as a warm-up. A time is that of all answers together,
prompts included. Answers must be those of plain decoding one at a time; those that are not, are counted.
"""

from __future__ import annotations

import argparse
import time

import torch
from transformers.utils import logging

from hdtool.data import demo
from hdtool.data.prompts import Prompt, read_prompts
from hdtool.runtime.answers import Answerer
from hdtool.runtime.config import DecodeConfig, ModelConfig, SamplingConfig
from hdtool.runtime.surroundings import machine

MOST = 160
SIZES = (1, 2, 4, 6, 8)
METHODS = ("ar", "hd")


def said(answerer: Answerer, prompts: list[Prompt]) -> tuple[list[list[int]], float, float]:
    """The ids of all answers, the tokens per second in total, and the tokens per step of one answer."""
    answers = []
    started = time.perf_counter()
    for answer in answerer.all_answers(prompts):
        for _ in answer:
            pass
        answers.append(answer)
    seconds = time.perf_counter() - started
    tokens = sum(answer.stats.tokens for answer in answers)
    steps = sum(answer.stats.steps for answer in answers)
    return [answer.output_ids for answer in answers], tokens / seconds, tokens / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=48)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(options.threads)
    prompts = list(read_prompts(demo.PROMPTS))[: options.prompts]
    print(f"{machine()}; {options.threads} threads, {len(prompts)} prompts\n")
    print(
        "| batch | plain, tokens/s | hd, tokens/s | speed-up | hd, tokens per step | plain against batch 1 | differ |"
    )
    print("|---|---|---|---|---|---|---|")
    alone: list[list[int]] = []
    first = 0.0
    for size in SIZES:
        speeds, per_step, differ = {}, 0.0, 0
        for method in METHODS:
            decoding = DecodeConfig(method, MOST, batch_size=size)
            answerer = Answerer(ModelConfig(device="cpu"), decoding, SamplingConfig())
            torch.set_num_threads(options.threads)
            said(answerer, prompts[: 2 * size])
            ids, speeds[method], per_step = said(answerer, prompts)
            alone = alone or ids
            differ += sum(found != plain for found, plain in zip(ids, alone, strict=True))
        first = first or speeds["ar"]
        print(
            f"| {size} | {speeds['ar']:.0f} | {speeds['hd']:.0f} | {speeds['hd'] / speeds['ar']:.2f} "
            f"| {per_step:.2f} | {speeds['ar'] / first:.2f} | {differ} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
