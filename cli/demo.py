"""``hdtool demo``: compare plain decoding with drafting on SmolLM2 or on the embedded model."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from hdtool.cli.command import INPUT_PANEL, MODEL_PANEL, option, quiet_libraries
from hdtool.cli.options import INTERRUPTED_EXIT, only
from hdtool.data import demo as demo_files
from hdtool.data.demo import EMBEDDED, SMOLLM2
from hdtool.data.errors import OptionError, did_you_mean
from hdtool.data.prompts import Prompt, read_prompts
from hdtool.runtime.config import DecodeConfig, ModelConfig, SamplingConfig, StoresConfig

if TYPE_CHECKING:
    from hdtool.runtime.answerer import Answerer
    from hdtool.runtime.sequence import Stats


DEMO_MODEL_OPTION = option(
    MODEL_PANEL,
    f"{SMOLLM2}: SmolLM2-135M-Instruct of the package {demo_files.PACKAGE}; {EMBEDDED}: a toy that ships with hdtool. "
    f"Default: {SMOLLM2} if installed.",
    values=(SMOLLM2, EMBEDDED),
)
DEMO_MODEL_OPTIONS = only("model", "device", "activations").described(model=DEMO_MODEL_OPTION).as_argument()
TOY_NOTE = "The embedded model is a toy of 7 million parameters"


def demo(
    *,
    num_prompts: Annotated[
        int, option(INPUT_PANEL, "Number of the demo's prompts to answer.", "--num-prompts", min=1)
    ] = 4,
    decoding: Annotated[DecodeConfig, only("method", "max_new_tokens", max_new_tokens=128)],
    loading: Annotated[ModelConfig, DEMO_MODEL_OPTIONS],
) -> int:
    """Compare drafting with plain decoding on a demo model.

    Answers a few prompts by plain decoding and with drafting. The text is the same. The stores contain no answer to
    them. The last lines tell what drafting brings from what hdtool's compiled layers bring over transformers'
    ``generate``, which answers the first prompt.
    """
    from hdtool.cli.answer_output import answer_summary, colors_shown, legend, stream_answer
    from hdtool.cli.terminal import wrap_for_terminal
    from hdtool.runtime.answerer import Answerer
    from hdtool.runtime.drafters.methods import compile_ahead, finish_compiling
    from hdtool.runtime.sequence import Stats

    quiet_libraries()
    method = decoding.method
    compile_ahead(loading, method)
    loading, store_set, questions = _chosen_model(loading)
    plain, drafting = (
        Answerer(loading, replace(decoding, method=one, prefix_caching=False), SamplingConfig(), store_set=store_set)
        for one in ("ar", method)
    )
    finish_compiling()  # the first answer times threads and passes, which the compiler would slow down
    every = read_prompts(questions)
    for answerer in (plain, drafting):
        _answer_once(answerer, every[-1])
    color = colors_shown()
    totals: dict[str, list[Stats]] = {"plain": [], "drafting": []}
    same = 0
    for prompt in every[:num_prompts]:  # the prompts alternate between categories
        (usual,) = plain.answers(prompt)
        for _ in usual:
            pass
        (answer,) = drafting.answers(prompt)
        print(wrap_for_terminal(f"\n▌ {prompt.category}\n{answer.question}\n", indent=""))
        stream_answer(answer, color=color)
        if answer.interrupted:
            return INTERRUPTED_EXIT
        same += answer.output_ids == usual.output_ids
        totals["plain"].append(usual.stats)
        totals["drafting"].append(answer.stats)
        print(f"\n{_comparison(method, usual.stats, answer.stats)}", flush=True)
    before, after = (Stats.total(parts) for parts in totals.values())
    shown = len(totals["drafting"])
    print(f"\n▌ in total: {same} of {shown} answers are identical\n{_comparison(method, before, after)}")
    speed = _speed_without_hdtool(plain, loading, every[0], decoding.max_new_tokens)
    print(wrap_for_terminal(f"\n{_gains(before, after, totals['plain'][0], speed, compiled=_is_compiled(plain))}"))
    print(wrap_for_terminal(f"\n{method}: {answer_summary(after)}"))
    if color:
        print(wrap_for_terminal(legend(after.that_drafted)))
    print(wrap_for_terminal(f"\n{'' if loading.model else f'{TOY_NOTE}. '}Name your own model: hdtool chat MODEL"))
    return 0 if same == shown else 1


def _gains(plain: Stats, drafted: Stats, first: Stats, generate: float, *, compiled: bool) -> str:
    """Return a sentence on the speed-up from drafting and one on the engine's speed-up without drafts.

    ``first`` has the statistics of plain decoding on the first prompt, and ``generate`` is the throughput of
    transformers' ``generate`` on that prompt, in tokens per second.
    """
    drafting, rate = plain.seconds / drafted.seconds, first.tokens_per_second
    engine = "hdtool's compiled CPU layers" if compiled else "hdtool's decoding loop"
    return (
        f"Drafting: {drafting:.2f} times as fast as plain decoding on the same engine.\n"
        f"The engine, {engine}: {rate / generate:.1f} times as fast as transformers' generate, without drafts on "
        f"either side ({rate:.0f} and {generate:.0f} tokens/s on the first prompt)."
    )


def _is_compiled(answerer: Answerer) -> bool:
    """Return True if the model runs on hdtool's compiled layers or matmuls instead of torch's."""
    from hdtool.runtime.kernels.linear import has_compiled_layers

    return has_compiled_layers(answerer.loaded.target.model)


def _answer_once(answerer: Answerer, prompt: Prompt) -> None:
    """Answer a prompt once as a warm-up, during which the model is loaded and code is compiled."""
    for _ in next(answerer.answers(prompt)):
        pass


def _speed_without_hdtool(plain: Answerer, loading: ModelConfig, prompt: Prompt, max_new_tokens: int) -> float:
    """Return the throughput of transformers' ``generate`` on one prompt, in tokens per second."""
    from hdtool.builders.evaluation.bench_plan import ContenderFactory
    from hdtool.data.chat import encode_conversation

    decoding = DecodeConfig(max_new_tokens=max_new_tokens)
    lineup = ContenderFactory(plain.loaded, plain.store_set, loading, decoding, SamplingConfig())
    ids = encode_conversation(plain.loaded.tokenizer, prompt.messages)
    (contender,) = lineup.contenders(["generate"]).values()
    turn = contender.answer(ids)
    return len(turn.output_ids) / turn.seconds


def _chosen_model(loading: ModelConfig) -> tuple[ModelConfig, StoresConfig, Path]:
    """Return the demo's model settings, store settings and file of questions.

    Raises OptionError for a model that is not part of the demo, and ModelError if SmolLM2's package is missing.
    """
    model = loading.model
    if model not in (None, *demo_files.NAMES):
        meant = did_you_mean(str(model), demo_files.NAMES)
        raise OptionError(
            f"hdtool demo runs {SMOLLM2} or {EMBEDDED}, got {model}{meant}: hdtool chat {model} runs your model"
        )
    file = demo_files.smollm2_file()
    if model == EMBEDDED or (model is None and not file):
        if model is None:
            print(f"{TOY_NOTE}; for a real one: {demo_files.INSTALL_SMOLLM2}", file=sys.stderr)
        loading = replace(loading, model=None)
        return loading, StoresConfig(str(demo_files.MODEL_STORE), str(demo_files.CORPUS_INDEX)), demo_files.PROMPTS
    from hdtool.builders.demo.stores import stores_of_real_model

    loading = replace(loading, model=demo_files.located(SMOLLM2))
    return loading, stores_of_real_model(loading), demo_files.QUESTIONS


def _comparison(method: str, plain: Stats, drafted: Stats) -> str:
    """Format two lines: the figures of plain decoding, and the figures of ``method`` with its speed-up."""
    width = max(len(method), len("plain"))
    lines = (
        f"  {name:{width}}  {stats.tokens:4} tokens in {stats.seconds:5.2f} s, {stats.tokens_per_second:5.0f} tokens/s"
        for name, stats in (("plain", plain), (method, drafted))
    )
    gain = plain.seconds / drafted.seconds
    return "\n".join(lines) + f", {drafted.tokens_per_step:.2f} a step: {gain:.2f} times plain"
