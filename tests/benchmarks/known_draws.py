"""Measures tokens per step of sampled answers when drafters know the seed, and when they do not.

    python -m tests.benchmarks.known_draws SmolLM2.gguf --questions question.jsonl [--temperatures 0.8 1.0]

Questions alternate between the categories of the file, and each has a different seed. Each one is answered by plain
decoding and by two cold drafters, of which only one knows the seed. All answers must be equal. ``--demo-stores`` drafts
from the stores that the demo builds for SmolLM2.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

import torch

from hdtool.data.chat import encode_conversation
from hdtool.data.prompts import interleave_categories, read_prompts
from hdtool.runtime.config.decoding import DecodeConfig
from hdtool.runtime.config.model import ACTIVATIONS, ModelConfig, SamplingConfig
from hdtool.runtime.core.drafter import WrappedDrafter
from hdtool.runtime.kernels.machine_name import machine
from hdtool.runtime.target.load import load
from tests.benchmarks.laboratory import Outcome, Table, method_contender, on_numbered_prompts, parser_of, stores_of

MAX_PROMPT_TOKENS = 900
SEEDS = 5000


class Unseeded(WrappedDrafter):
    """Drafter that is not told the seed."""

    def set_seed(self, seed: int | None) -> None:
        pass


def main() -> None:
    parser = parser_of(
        __doc__, skip=0, limit=72, methods=["hd", "hd+logitspec"], temperatures=[0.8, 1.0], draft_tokens=[8, 32],
        max_new_tokens=128, demo_stores=False,
    )  # fmt: skip
    parser.add_argument("model")
    parser.add_argument("--questions", type=Path, required=True)
    parser.add_argument("--activations", choices=ACTIVATIONS, default=ACTIVATIONS[0])
    options = parser.parse_args()
    torch.set_num_threads(1)
    loading = ModelConfig(options.model, device="cpu", activations=options.activations)
    loaded = load(loading)
    stores = stores_of(options, loading)
    questions = interleave_categories(read_prompts(options.questions), options.skip + options.limit)[options.skip :]
    prompts = [encode_conversation(loaded.tokenizer, question.messages[:1]) for question in questions]
    numbers = [number for number, prompt in enumerate(prompts) if len(prompt) <= MAX_PROMPT_TOKENS]
    print(f"{machine()}\n")
    table = Table("method", "temperature", "draft tokens", "without", "with", "more")
    for method, temperature, nodes in product(options.methods, options.temperatures, options.draft_tokens):
        plain = method_contender(loaded, DecodeConfig("ar", options.max_new_tokens))
        seeded = method_contender(loaded, DecodeConfig(method, options.max_new_tokens, draft_tokens=nodes), stores)
        new = seeded.new_drafter

        def sampling_of(number: int, temperature: float = temperature) -> SamplingConfig:
            return SamplingConfig(temperature=temperature, seed=SEEDS + number)

        contenders = [plain, replace(seeded, new_drafter=lambda new=new: Unseeded(new())), seeded]  # type: ignore[misc]
        entered = {str(at): on_numbered_prompts(each, prompts, sampling_of) for at, each in enumerate(contenders)}
        outcome = Outcome(entered, numbers)
        assert outcome.identical == len(numbers), "drafts changed an answer"
        _, without, with_seed = (total.later.tokens_per_step for total in outcome.totals.values())
        more = f"{100 * (with_seed / without - 1):.1f} %"
        table.row(f"`{method}`", temperature, nodes, f"{without:.3f}", f"{with_seed:.3f}", more)


if __name__ == "__main__":
    main()
