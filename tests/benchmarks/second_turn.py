"""Measures the time to first token of a second turn, with and without the KV cache of the first.

python -m tests.benchmarks.second_turn --model MODEL --tokens 4000 --threads 1
"""

from __future__ import annotations

from functools import partial
from statistics import median

from hdtool.builders.evaluation.experiment import DecodedTurn, timed_turn
from hdtool.data.chat import encode_conversation
from hdtool.runtime.answering.answer_plan import plan_answer
from hdtool.runtime.config.model import ModelConfig, SamplingConfig
from hdtool.runtime.core.drafter import NoDraft
from hdtool.runtime.generation.text_stream import text_of
from hdtool.runtime.target.cpu_threads import choose_threads
from hdtool.runtime.target.load import Loaded, load
from tests.benchmarks.laboratory import Outcome, documentation, parser_of

QUESTION = "\n\nName the topic of this text."
NEXT = "Which words of it are new to you?"
MAX_NEW_TOKENS = 24
WHOLE, CACHED = "whole", "cached"


def answered(loaded: Loaded, prompt: list[int], *, cached: bool) -> DecodedTurn:
    request = plan_answer(loaded, SamplingConfig(), prompt, MAX_NEW_TOKENS).request(None, NoDraft())
    return timed_turn(loaded.target, request, prefix_caching=cached)


def main() -> None:
    options = parser_of(__doc__, model=None, tokens=4000, threads=1, rounds=5).parse_args()
    loaded = load(ModelConfig(options.model))
    choose_threads(loaded.target, options.threads)
    messages = [{"role": "user", "content": documentation(loaded, options.tokens)[0] + QUESTION}]
    asked = encode_conversation(loaded.tokenizer, messages)
    text = text_of(loaded.tokenizer, answered(loaded, asked, cached=False).output_ids)
    later = [*messages, {"role": "assistant", "content": text}, {"role": "user", "content": NEXT}]
    following = encode_conversation(loaded.tokenizer, later)

    def second_turn(name: str, prompt: list[int]) -> list[DecodedTurn]:
        answered(loaded, asked, cached=True)  # leaves only the first turn in the cache
        return [answered(loaded, prompt, cached=name == CACHED)]

    contenders = {name: lambda name=name: partial(second_turn, name) for name in (WHOLE, CACHED)}
    outcome = Outcome(contenders, [following], options.rounds)
    seconds = {name: [row.turns[0].first_seconds or 0.0 for row in rows] for name, rows in outcome.rows.items()}
    whole, rest = (median(seconds[name]) for name in (WHOLE, CACHED))
    ratios = [before / after for before, after in zip(seconds[WHOLE], seconds[CACHED], strict=True)]
    kept = outcome.totals[CACHED].stats.cached_tokens // options.rounds
    print(f"second turn of {len(following):,} tokens, {kept:,} of them kept, {options.threads} threads, float32")
    print(f"median seconds to the first token: {whole:.3f} read as a whole, {rest:.3f} after the kept tokens")
    print(f"{whole / rest:.1f} times sooner ({min(ratios):.1f} to {max(ratios):.1f} in {options.rounds} rounds)")
    print(f"answers are identical: {'yes' if outcome.identical else 'NO'}")


if __name__ == "__main__":
    main()
