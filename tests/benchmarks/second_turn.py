"""Measures the time to first token of a second turn, with and without the KV cache of the first.

python -m tests.benchmarks.second_turn --model MODEL --tokens 4000 --threads 1
"""

from __future__ import annotations

import argparse
import statistics
import time
from itertools import islice
from pathlib import Path

from hdtool import ModelConfig, SamplingConfig, decode, load
from hdtool.data.chat import encode_conversation
from hdtool.runtime.samplers import sampler_for
from hdtool.runtime.target.load import Loaded
from hdtool.runtime.target.threads import choose_threads

DOCS = Path(__file__).parents[2] / "docs"
QUESTION = "\n\nName the topic of this text."
NEXT = "Which words of it are new to you?"
MAX_NEW_TOKENS = 24


def first_prompt(loaded: Loaded, tokens: int) -> str:
    """Return text from the documentation, cut to ``tokens`` tokens, followed by a question."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted(DOCS.rglob("*.md")))
    ids = loaded.tokenizer(text)["input_ids"][:tokens]
    return str(loaded.tokenizer.decode(ids)) + QUESTION


def answered(loaded: Loaded, ids: list[int], *, cached: bool) -> tuple[str, float, int]:
    """Return the answer, the seconds to its first token, and the number of cached prompt tokens."""
    sampler, stops = sampler_for(loaded, SamplingConfig(), ids, max_new_tokens=MAX_NEW_TOKENS)
    started = time.perf_counter()
    steps = decode(loaded.target, ids, sampler, max_new_tokens=MAX_NEW_TOKENS, stops=stops, prefix_caching=cached)
    first = next(steps)
    seconds = time.perf_counter() - started
    tokens = [*first.tokens, *(token for step in islice(steps, MAX_NEW_TOKENS) for token in step.tokens)]
    return str(loaded.tokenizer.decode(tokens, skip_special_tokens=True)), seconds, first.cached_tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    loaded = load(ModelConfig(options.model))
    choose_threads(loaded.target, options.threads)
    messages = [{"role": "user", "content": first_prompt(loaded, options.tokens)}]
    asked = encode_conversation(loaded.tokenizer, messages)
    text, _, _ = answered(loaded, asked, cached=False)
    later = [*messages, {"role": "assistant", "content": text}, {"role": "user", "content": NEXT}]
    following = encode_conversation(loaded.tokenizer, later)
    seconds: dict[bool, list[float]] = {True: [], False: []}
    texts, kept = set(), 0
    for number in range(options.rounds):
        for cached in (True, False) if number % 2 else (False, True):
            answered(loaded, asked, cached=True)  # leaves only the first turn in the cache
            found, taken, reused = answered(loaded, following, cached=cached)
            kept = max(kept, reused)
            seconds[cached].append(taken)
            texts.add(found)
    whole, rest = (statistics.median(seconds[cached]) for cached in (False, True))
    ratios = [before / after for before, after in zip(seconds[False], seconds[True], strict=True)]
    print(f"second turn of {len(following):,} tokens, {kept:,} of them kept, {options.threads} threads, float32")
    print(f"median seconds to the first token: {whole:.3f} read as a whole, {rest:.3f} after the kept tokens")
    print(f"{whole / rest:.1f} times sooner ({min(ratios):.1f} to {max(ratios):.1f} in {options.rounds} rounds)")
    print(f"answers are identical: {'yes' if len(texts) == 1 else 'NO'}")


if __name__ == "__main__":
    main()
