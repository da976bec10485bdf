"""Compares plain decoding, ``hd``, and ``hd`` with drafts from the grammar on structured output.

    python -m tests.benchmarks.structured MODEL [--schemas 30] [--max-new-tokens 160] [--temperature 0.8] [--rounds 1]
        [--demo-stores]

All three decode under the grammar's mask. They answer each of 30 schemas in turn, with a fresh drafter per answer
(cold). ``--demo-stores`` drafts from the stores that the demo builds for SmolLM2, made of the model's answers to
everyday questions and of code and text; otherwise there are no stores. Answers are compared with plain decoding and
validated.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from statistics import median

import torch

from hdtool.builders.demo.demo_stores import stores_of_real_model
from hdtool.builders.evaluation.experiment import Answering, DecodedTurn, timed_turn
from hdtool.data.chat import encode_conversation
from hdtool.data.prompts import Grammar
from hdtool.runtime.answering.answer_plan import compiler_for, plan_answer
from hdtool.runtime.core.step import Finish
from hdtool.runtime.kernels.machine_name import machine
from hdtool.runtime.settings.decoding import DecodeConfig
from hdtool.runtime.settings.model import ACTIVATIONS, ModelConfig, SamplingConfig
from hdtool.runtime.target.load import Loaded, load
from tests.benchmarks.laboratory import NO_STORES, Outcome, Table, method_contender, parser_of, ratio_of
from tests.support.json_schemas import JSON_SCHEMAS

PLAIN, MASKED, GUIDED = "ar", "hd, masked", "hd, guided"
MODES = (PLAIN, MASKED, GUIDED)

Question = tuple[Grammar, list[int]]


def question_of(loaded: Loaded, grammar: Grammar, text: str) -> Question:
    return grammar, encode_conversation(loaded.tokenizer, [{"role": "user", "content": text}])


def answering(mode: str, loaded: Loaded, options: argparse.Namespace) -> Answering[Question]:
    method = DecodeConfig("ar" if mode == PLAIN else "hd", options.max_new_tokens)
    drafter = method_contender(loaded, method, options.stores).new_drafter()
    compiler, sampling = compiler_for(loaded), SamplingConfig(temperature=options.temperature, seed=1)

    def answer(question: Question) -> list[DecodedTurn]:
        grammar, prompt = question
        plan = plan_answer(loaded, sampling, prompt, options.max_new_tokens, compiler.guide(grammar))
        request = plan.request(None, drafter, draft_tokens=None if mode == GUIDED else 0)
        return [timed_turn(loaded.target, request)]

    return answer


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def main() -> None:
    parser = parser_of(
        __doc__, schemas=len(JSON_SCHEMAS), max_new_tokens=160, temperature=0.0, rounds=1, demo_stores=False
    )
    parser.add_argument("model")
    parser.add_argument("--activations", choices=ACTIVATIONS, default=ACTIVATIONS[0])
    options = parser.parse_args()
    torch.set_num_threads(1)
    loading = ModelConfig(options.model, device="cpu", activations=options.activations)
    loaded = load(loading)
    options.stores = stores_of_real_model(loading) if options.demo_stores else NO_STORES
    questions = [
        question_of(
            loaded,
            Grammar.json_schema(schema),
            f"Write an example of the following as JSON: {name}. Use this JSON schema: {json.dumps(schema)}",
        )
        for name, schema in list(JSON_SCHEMAS.items())[: options.schemas]
    ]
    contenders = {mode: partial(answering, mode, loaded, options) for mode in MODES}
    warm_up = [question_of(loaded, Grammar.regex("[a-z]{8}"), "Hi")]
    outcome = Outcome(contenders, questions, options.rounds, warm_up=warm_up)
    report(outcome, loaded)
    print(f"\n{options.model}, temperature {options.temperature}, one thread, {machine(loaded.target.device)}")


def report(outcome: Outcome, loaded: Loaded) -> None:
    table = Table(
        "", "tokens per step", "tokens/s", "times plain", "times masked", "after the prompt: times plain",
        "times masked", "identical", "complete", "valid",
    )  # fmt: skip
    turns = {mode: [row.turns[0] for row in rows] for mode, rows in outcome.rows.items()}
    speeds = {mode: [len(turn.output_ids) / turn.seconds for turn in of] for mode, of in turns.items()}
    later = {
        mode: [(len(turn.output_ids) - 1) / (turn.seconds - (turn.first_seconds or 0.0)) for turn in of]
        for mode, of in turns.items()
    }
    for mode, of in turns.items():
        complete = [turn for turn in of if turn.finish == Finish.STOP]
        texts = [str(loaded.tokenizer.decode(turn.output_ids, skip_special_tokens=True)) for turn in complete]
        equal = sum(one.output_ids == plain.output_ids for one, plain in zip(of, turns[PLAIN], strict=True))
        ratios = (f"{ratio_of(by[mode], by[other]):.2f}" for by in (speeds, later) for other in (PLAIN, MASKED))
        table.row(
            mode,
            f"{outcome.totals[mode].stats.tokens_per_step:.2f}",
            f"{median(speeds[mode]):.1f}",
            *ratios,
            f"{equal} of {len(of)}",
            len(complete),
            sum(map(is_json, texts)),
        )


if __name__ == "__main__":
    main()
