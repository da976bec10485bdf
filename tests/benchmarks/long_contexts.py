"""Measures drafting after long contexts: tokens per second of `hd` and of plain decoding, by context length.

    python -m tests.benchmarks.long_contexts --model smollm2 --contexts 1000 4000 8000
    python -m tests.benchmarks.long_contexts --shape config.json --device cuda --contexts 16000 64000

Each context is another passage of the documentation, followed by a question. Both methods read the prompt in a warm-up;
then they answer in turn with the same KV cache, and the one that begins alternates. Times are CPU time, or wall-clock
time on a GPU. ``--shape`` uses random weights: greedy answers repeat themselves, so most drafts are accepted; with
``--temperature 1`` hardly any is, which is the worst case.
"""

from __future__ import annotations

import argparse
from functools import partial
from statistics import median

import torch

from hdtool.builders.evaluation.experiment import Answering, DecodedTurn, Figures, timed_turn
from hdtool.builders.evaluation.random_models import load_shape
from hdtool.data.answered_questions import AnsweredTurn
from hdtool.data.chat import encode_conversation
from hdtool.runtime.answering.answer_plan import plan_answer
from hdtool.runtime.kernels.machine_name import machine
from hdtool.runtime.settings.decoding import DecodeConfig
from hdtool.runtime.settings.model import ModelConfig, SamplingConfig
from hdtool.runtime.target.load import Loaded, load
from tests.benchmarks.laboratory import Outcome, Table, documentation, method_contender, parser_of

QUESTION = "Write a letter to a friend about this text, in your own words."


def answering(loaded: Loaded, method: str, options: argparse.Namespace) -> Answering[list[int]]:
    decoding, sampling = DecodeConfig(method, options.tokens), SamplingConfig(temperature=options.temperature)
    drafter = method_contender(loaded, decoding).new_drafter()

    def answer(prompt: list[int]) -> list[DecodedTurn]:
        request = plan_answer(loaded, sampling, prompt, options.tokens).request(None, drafter)
        return [timed_turn(loaded.target, request, prefix_caching=True)]

    return answer


def compare(loaded: Loaded, length: int, options: argparse.Namespace) -> list[str]:
    contenders = {method: partial(answering, loaded, method, options) for method in ("ar", "hd")}
    ratios, plain, total, differing = list[float](), list[float](), Figures(), 0
    for text in documentation(loaded, length, options.texts):
        prompt = encode_conversation(loaded.tokenizer, [{"role": "user", "content": f"{text}\n\n{QUESTION}"}])
        outcome = Outcome(contenders, [prompt], options.rounds, warm_up=[prompt])  # reads the prompt
        speeds = {
            method: median(speed_of(row.turns[0], loaded) for row in rows) for method, rows in outcome.rows.items()
        }
        plain.append(speeds["ar"])
        ratios.append(speeds["hd"] / speeds["ar"])
        total += outcome.totals["hd"]
        differing += not outcome.identical
    figures = median(plain), median(ratios), min(ratios), total.stats.tokens_per_step
    return [f"{length:,}", f"{figures[0]:.1f}", *(f"{one:.2f}" for one in figures[1:]), str(differing or "none")]


def speed_of(turn: AnsweredTurn, loaded: Loaded) -> float:
    on_cpu = loaded.target.device.type == "cpu"
    return len(turn.output_ids) / ((turn.cpu_seconds if on_cpu else None) or turn.seconds)


def main() -> None:
    parser = parser_of(
        __doc__, model="smollm2", device="cpu", activations="float32", contexts=[1000, 4000, 8000], temperature=0.0,
        texts=5, rounds=3, tokens=96, threads=1,
    )  # fmt: skip
    parser.add_argument("--shape", help="a shape of bench-shape, or a config.json, with the tokenizer of --model")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    kinds = {"activations": options.activations} if options.device == "cpu" else {}
    config = ModelConfig(options.model, device=options.device, **kinds)
    loaded = load_shape(options.shape, config) if options.shape else load(config)
    numbers = options.activations if options.device == "cpu" else str(loaded.target.dtype).removeprefix("torch.")
    print(f"{machine(loaded.target.device)}; {loaded.name}, {numbers}, {options.tokens} tokens\n")
    table = Table(
        "context", "plain, tokens/s", "`hd`: times plain", "worst text", "tokens per step", "texts with other answers"
    )
    for length in options.contexts:
        table.row(*compare(loaded, length, options))


if __name__ == "__main__":
    main()
