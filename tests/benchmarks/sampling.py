"""Compares sampling with one logits processor at a time and with a fused truncation step.

    python -m tests.benchmarks.sampling MODEL [--activations int8] [--tokens 96]

Both ways answer the same prompts in turn by plain decoding, and their answers are compared. The sampling time is what a
step takes besides the model's pass.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch

from hdtool.builders.evaluation.experiment import Answering, DecodedTurn, timed_turn
from hdtool.data.chat import encode_conversation
from hdtool.runtime.core.request import Request
from hdtool.runtime.core.sampler import Sampler, Shortcuts
from hdtool.runtime.kernels.machine_name import machine
from hdtool.runtime.settings.model import ACTIVATIONS, ModelConfig, SamplingConfig
from hdtool.runtime.target.load import Loaded, load
from tests.benchmarks.laboratory import Outcome, Table, parser_of, ratio_of
from tests.support.samplers import race_winner

SETTINGS = {
    "temperature 0.8": SamplingConfig(0.8, seed=1),
    "temperature 0.8, top-k 50": SamplingConfig(0.8, top_k=50, seed=1),
    "temperature 0.8, top-p 0.95": SamplingConfig(0.8, top_p=0.95, seed=1),
    "temperature 0.8, top-k 50, top-p 0.95": SamplingConfig(0.8, top_k=50, top_p=0.95, seed=1),
}
PROMPTS = (
    "Explain photosynthesis in simple words.",
    "Write a short story about a dog and a river.",
    "What are three uses of a paper clip?",
    "List the planets of the solar system with one fact each.",
)


class OneByOne(Sampler):
    """Sampler that calls each logits processor separately, as ``generate`` does."""

    def __init__(self, config: SamplingConfig, context: list[int]) -> None:
        super().__init__(config, context)
        self.shortcuts = Shortcuts()

    def choose_processed(self, logits: torch.Tensor, row: int) -> int:
        probabilities = self.scores(logits[row]).softmax(dim=-1).numpy()
        return race_winner(self._race, len(self.context), np.ascontiguousarray(probabilities))


def answering(way: type[Sampler], loaded: Loaded, config: SamplingConfig, tokens: int) -> Answering[list[int]]:
    def answer(prompt: list[int]) -> list[DecodedTurn]:
        return [timed_turn(loaded.target, Request(None, prompt, way(config, prompt), max_new_tokens=tokens))]

    return answer


def main() -> None:
    parser = parser_of(__doc__, tokens=96)
    parser.add_argument("model")
    parser.add_argument("--activations", choices=ACTIVATIONS, default=ACTIVATIONS[0])
    options = parser.parse_args()
    torch.set_num_threads(1)
    loaded = load(ModelConfig(options.model, activations=options.activations))
    asked = [encode_conversation(loaded.tokenizer, [{"role": "user", "content": prompt}]) for prompt in PROMPTS]
    table = Table(
        "settings", "processors, ms beside a pass", "one step", "pass, ms", "tokens per second, ratio", "identical"
    )
    for name, config in SETTINGS.items():
        ways = {way.__name__: partial(answering, way, loaded, config, options.tokens) for way in (OneByOne, Sampler)}
        outcome = Outcome(ways, asked, warm_up=[asked[0][:8]])
        old, new = (outcome.totals[way].later for way in ways)
        slow, fast = ([row.tokens_per_second for row in outcome.rows[way]] for way in ways)
        table.row(
            name,
            f"{old.outside_us_per_step / 1e3:.2f}",
            f"{new.outside_us_per_step / 1e3:.2f}",
            f"{new.verify_ms_per_step:.2f}",
            f"{ratio_of(fast, slow):.2f}",
            f"{outcome.identical} of {len(asked)}",
        )
    print(f"\n{options.model}, one thread, {machine(loaded.target.device)}")


if __name__ == "__main__":
    main()
