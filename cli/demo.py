"""``hdtool demo``: compare plain decoding with drafting on SmolLM2, on the embedded model or on a user's own."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce
from operator import add
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from hdtool.cli.command import Option, quiet_libraries
from hdtool.cli.options_from_settings import only
from hdtool.data import demo as demo_files
from hdtool.data.demo import EMBEDDED, SMOLLM2
from hdtool.data.notes import tell
from hdtool.data.prompts import Prompt, read_prompts
from hdtool.runtime.settings.decoding import DecodeConfig, StoresConfig
from hdtool.runtime.settings.model import ModelConfig, SamplingConfig
from hdtool.runtime.settings.settings_base import Panel

if TYPE_CHECKING:
    from hdtool.runtime.answering.answer_prompts import Answerer


DEMO_MODEL_OPTION = Option(
    Panel.MODEL,
    f"{SMOLLM2}, {EMBEDDED}, or your own. {SMOLLM2}: SmolLM2-135M-Instruct of the package {demo_files.PACKAGE}; "
    f"{EMBEDDED}: a toy that ships with hdtool. Your own is a folder, a hub name or a GGUF file, and drafts from its "
    f"stores if it has any. Default: {SMOLLM2} if installed.",
)
DEMO_MODEL_OPTIONS = only("model", "device", "activations").described(model=DEMO_MODEL_OPTION).as_argument()
WARM_UP_TOKENS = 16
NEXT = "Next: hdtool chat MODEL talks to your model; hdtool setup MODEL --logs FILE measures it on your own chats."
TOY_NOTE = "The embedded model is a toy of 7 million parameters"


def demo(
    *,
    num_prompts: Annotated[
        int, Option(Panel.INPUT, "Number of the demo's prompts to answer.", "--num-prompts", min=1)
    ] = 4,
    decoding: Annotated[DecodeConfig, only("method", "max_new_tokens", max_new_tokens=128)],
    loading: Annotated[ModelConfig, DEMO_MODEL_OPTIONS],
) -> int:
    """Compare drafting with plain decoding on a model.

    Answers a few prompts by plain decoding and with drafting, up to three times in turn. The text is the same. The
    demo's stores contain no answer to them. The last lines tell what drafting brings from what hdtool's compiled layers
    bring over transformers' ``generate``.
    """
    from hdtool.builders.demo.comparison import Comparison, SideBySide, engine_and_generate
    from hdtool.cli import demo_output as output
    from hdtool.cli.answer_output import colors_shown, legend
    from hdtool.runtime.answering.answer_prompts import Answerer
    from hdtool.runtime.drafters.drafter_factory import compile_ahead, finish_compiling

    quiet_libraries()
    compile_ahead(loading, decoding.method)
    loading, stores, questions = _chosen_model(loading)
    answerer = Answerer(loading, replace(decoding, max_new_tokens=WARM_UP_TOKENS), SamplingConfig(), stores=stores)
    finish_compiling()  # the first answer times threads and passes, which the compiler would slow down
    every = [*(read_prompts(demo_files.TASKS) if loading.model else ()), *read_prompts(questions)]
    _answer_once(answerer, every[-1])
    side_by_side = SideBySide(answerer.loaded, answerer.store_set, decoding)
    side_by_side.compare(every[-1], rounds=1)
    color, parts = colors_shown(), list[Comparison]()
    for prompt in every[:num_prompts]:
        print(f"\n{output.title_and_questions(prompt)}", flush=True)
        parts.append(side_by_side.compare(prompt))
        print(output.shortened_answer(parts[-1].pieces, color=color))
        print(output.figures(parts[-1]), *output.reasons(parts[-1]), sep="\n", flush=True)
    print(f"\n{output.total_figures(parts)}", flush=True)
    print(output.engine_figures(_engine_name(answerer), *engine_and_generate(answerer.loaded, loading, every[-1])))
    if color:
        print(output.fitted(legend(reduce(add, parts).drafted.stats.that_helped)))
    print(output.fitted(NEXT if loading.model else f"{TOY_NOTE}. {NEXT}"))
    return 0 if all(one.same for one in parts) else 1


def _answer_once(answerer: Answerer, prompt: Prompt) -> None:
    """Answer a prompt's first turn as a warm-up, in which passes are timed and the number of threads is chosen."""
    for answer in answerer.all_answers([prompt]):
        for _ in answer:
            pass
        return


def _engine_name(answerer: Answerer) -> str:
    """Return the demo's name for what decodes: hdtool's compiled CPU layers or, without them, its decoding loop."""
    return "hdtool's compiled CPU layers" if answerer.loaded.target.compiled else "hdtool's decoding loop"


def _chosen_model(loading: ModelConfig) -> tuple[ModelConfig, StoresConfig, Path]:
    """Return the demo's model settings, store settings and file of questions.

    The default is SmolLM2 if its package is installed, else the embedded model. Raise ModelError if SmolLM2 is named
    without being installed.
    """
    model = loading.model
    if model is not None and (model not in demo_files.NAMES or Path(model).exists()):
        return loading, StoresConfig(), demo_files.QUESTIONS
    file = demo_files.smollm2_file()
    if model == EMBEDDED or (model is None and not file):
        if model is None:
            tell(f"{TOY_NOTE}; for a real one: {demo_files.INSTALL_SMOLLM2}")
        loading = replace(loading, model=None)
        return loading, StoresConfig(str(demo_files.MODEL_STORE), str(demo_files.CORPUS_INDEX)), demo_files.PROMPTS
    from hdtool.builders.demo.demo_stores import stores_of_real_model

    loading = replace(loading, model=demo_files.located(SMOLLM2))
    return loading, stores_of_real_model(loading), demo_files.QUESTIONS
