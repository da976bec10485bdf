"""Compares sampling with one logits processor at a time and with a fused truncation step.

    python -m tests.benchmarks.sampling MODEL [--activations int8] [--tokens 96]

Both ways answer the same prompts in turn by plain decoding, and their answers are compared. The sampling time is what a
step takes besides the model's pass.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence

import numpy as np
import torch

from hdtool.data.chat import encode_conversation
from hdtool.runtime.answerer import decode
from hdtool.runtime.config.model import ACTIVATIONS, ModelConfig, SamplingConfig
from hdtool.runtime.core.sampler import Sampler
from hdtool.runtime.core.sequence import Step
from hdtool.runtime.kernels.machine import machine
from hdtool.runtime.target.load import Loaded, load

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

    def choose_processed(self, logits: torch.Tensor, row: int) -> int:
        probabilities = self.scores(logits[row]).softmax(dim=-1).numpy()
        return self._race.sample(len(self.context), np.ascontiguousarray(probabilities))


SAMPLERS = (OneByOne, Sampler)


def steps_of(
    way: type[Sampler], loaded: Loaded, prompt: Sequence[int], config: SamplingConfig, max_new_tokens: int
) -> list[Step]:
    """Return all steps of an answer except the prefill."""
    found = decode(loaded.target, prompt, way(config, prompt), max_new_tokens=max_new_tokens, prefix_caching=False)
    return list(found)[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--activations", choices=ACTIVATIONS, default=ACTIVATIONS[0])
    parser.add_argument("--tokens", type=int, default=96)
    options = parser.parse_args()
    torch.set_num_threads(1)
    loaded = load(ModelConfig(options.model, activations=options.activations))
    asked = [encode_conversation(loaded.tokenizer, [{"role": "user", "content": prompt}]) for prompt in PROMPTS]
    print("| settings | processors, ms beside a pass | one step | pass, ms | tokens per second, ratio | identical |")
    print("|---|---|---|---|---|---|")
    for name, config in SETTINGS.items():
        for way in SAMPLERS:  # warm-up: compiles
            steps_of(way, loaded, asked[0], config, 4)
        seconds_outside_pass: dict[type[Sampler], list[float]] = {way: [] for way in SAMPLERS}
        passes, ratios, identical = [], [], 0
        for prompt in asked:
            found = [steps_of(way, loaded, prompt, config, options.tokens) for way in SAMPLERS]
            for way, steps in zip(SAMPLERS, found, strict=True):
                seconds_outside_pass[way] += [1e3 * (step.seconds - step.verify_seconds) for step in steps]
                passes += [1e3 * step.verify_seconds for step in steps]
            slow, fast = (statistics.median(step.seconds for step in steps) for steps in found)
            ratios.append(slow / fast)
            identical += len({tuple(token for step in steps for token in step.tokens) for steps in found}) == 1
        old, new = (statistics.median(seconds_outside_pass[way]) for way in SAMPLERS)
        print(
            f"| {name} | {old:.2f} | {new:.2f} | {statistics.median(passes):.2f} | {statistics.median(ratios):.2f} "
            f"| {identical} of {len(asked)} |",
            flush=True,
        )
    print(f"\n{options.model}, one thread, {machine(loaded.target.device)}")


if __name__ == "__main__":
    main()
