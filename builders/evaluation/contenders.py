"""Contenders of a benchmark, models of known shapes with random weights, and the plot of forward pass costs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
)

from hdtool.builders.evaluation.estimated_passes import PassReads, Roofline
from hdtool.builders.evaluation.timing import Stopwatch
from hdtool.data.conversation_shapes import AnsweredTurn
from hdtool.data.errors import CostError, ModelError, OptionError, did_you_mean
from hdtool.data.output_files import PNG_METADATA, OutputFile, is_own_png
from hdtool.runtime.answerer import decode
from hdtool.runtime.budget.cost_curve import CostCurve
from hdtool.runtime.budget.measure_passes import lengths_within
from hdtool.runtime.config import SHAPES, CostConfig, ModelConfig, SamplingConfig
from hdtool.runtime.core.drafter import Drafter
from hdtool.runtime.core.sequence import Finish, Stats, Step, room_for
from hdtool.runtime.generation.grammar import Guide, guided_drafter, masks_of
from hdtool.runtime.generation.settings import refuse_settings
from hdtool.runtime.generation.text_stream import text_of
from hdtool.runtime.kernels.linear import compile_linear_layers
from hdtool.runtime.kernels.machine import dtype_name
from hdtool.runtime.model.families import refuse_by_configuration
from hdtool.runtime.model.placement import use_planless_attention
from hdtool.runtime.model.transformers_internals import cache_in
from hdtool.runtime.samplers import generate_options, sampler_for
from hdtool.runtime.target.load import Loaded, load_tokenizer, pick_device, pick_dtype
from hdtool.runtime.target.target import Target

COST_PLOT_INCHES, COST_PLOT_DPI = (7.0, 4.2), 150


def draw_cost(curve: CostCurve, path: Path) -> None:
    """Plot milliseconds per forward pass against the number of draft nodes, one line per context length, as a PNG."""
    from matplotlib import colormaps, style
    from matplotlib.figure import Figure  # not pyplot, which keeps global state

    with style.context("default"):  # the current folder may hold a matplotlibrc, which can even run LaTeX
        figure: Any = Figure(figsize=COST_PLOT_INCHES, layout="constrained")
        axes = figure.subplots()
        for place, (context, times) in enumerate(zip(curve.contexts, curve.milliseconds, strict=True)):
            color = colormaps["viridis"](0.9 * place / max(1, len(curve.contexts) - 1))
            axes.plot(curve.nodes, times, marker="o", markersize=3.5, color=color, label=f"{context:,}")
        axes.set(xlabel="draft nodes in the pass", ylabel="milliseconds", xlim=(0, None), ylim=(0, None))
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(title="context, tokens", fontsize="small", title_fontsize="small")
        axes.set_title(f"A forward pass of {curve.model} in {curve.dtype}\n{curve.device}", fontsize="medium")
        with cost_plot_file(path).replaced() as stream:
            figure.savefig(stream, format="png", dpi=COST_PLOT_DPI, metadata=PNG_METADATA)


def cost_plot_file(path: Path) -> OutputFile:
    """Return the ``OutputFile`` of the plot, which never replaces a file that hdtool did not draw."""
    return OutputFile(path, "a picture of hdtool bench-cost", is_own_png, CostError)


SHAPE_SEED = 0


def load_shape(shape: str, config: ModelConfig) -> Loaded:
    """Create a model with random weights, given the name of a known shape or the path of a configuration.

    Its tokenizer is loaded from the model that ``config`` names.
    """
    tokenizer = load_tokenizer(config)
    if config.quantization:
        raise OptionError(
            f"--quantization {config.quantization} has no effect on a shape, whose weights are random: leave it out"
        )
    settings = shape_config(shape)
    refuse_by_configuration(settings)
    text = settings.get_text_config(decoder=True)
    if text.vocab_size < len(tokenizer):
        text.vocab_size = len(tokenizer)
    device = pick_device(config.device)
    use_planless_attention(device)
    try:
        dtype = pick_dtype(config.dtype, device)
        torch.manual_seed(SHAPE_SEED)
        with device:  # allocate on the device: a copy would need twice the memory
            model: Any = AutoModelForCausalLM.from_config(
                settings,
                dtype=dtype if isinstance(dtype, torch.dtype) else torch.bfloat16,
                trust_remote_code=False,
            )
        if device.type == "cpu":
            compile_linear_layers(model)
        target = Target(model)
        if device.type == "cpu":
            target.compile()
    except torch.OutOfMemoryError:
        raise ModelError(f"{shape} does not fit into the memory of its device: take a smaller shape or dtype") from None
    return Loaded(f"{shape}, random weights", target, tokenizer)


def estimated_passes(shape: str, config: ModelConfig, costs: CostConfig) -> CostCurve:
    """Estimate the cost of a model's forward passes from its shape or configuration, without allocating weights."""
    assert costs.bandwidth
    if config.quantization:
        raise OptionError(f"--quantization {config.quantization} has no effect on an estimate: leave it out")
    settings = shape_config(shape)
    refuse_by_configuration(settings)
    limit = getattr(settings.get_text_config(decoder=True), "max_position_embeddings", None)
    lengths = lengths_within(lambda length: limit, shape, costs)
    dtype = torch.bfloat16 if config.dtype == "auto" else getattr(torch, config.dtype)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(settings, dtype=dtype, trust_remote_code=False)
    roofline = Roofline(costs.bandwidth * 1e9, costs.teraflops * 1e12 if costs.teraflops else None)
    return roofline.curve(PassReads.of(model), lengths, costs.overlap, model=shape, dtype=dtype_name(dtype))


def shape_config(shape: str) -> Any:
    if shape in SHAPES:
        return LlamaConfig(**SHAPES[shape], bos_token_id=1, eos_token_id=2, pad_token_id=0)
    path = Path(shape).expanduser()
    if not path.exists():
        meant, shapes = did_you_mean(shape, SHAPES), ", ".join(SHAPES)
        raise OptionError(f"shape is {shape!r}{meant}: it must be one of {shapes}, or the path of a config.json")
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ModelError(f"{shape} is no configuration of a model ({reason}): name a config.json") from None


def weight_bytes_read(target: Target) -> int:
    """Return how many bytes of weights a pass over one token reads, excluding unused embeddings and experts."""
    return round(PassReads.of(target.model).weights(1))


class Contender(Protocol):
    """Answers prompts and measures how long each answer takes."""

    def answer(self, prompt: list[int], guide: Guide | None = None, prediction: Sequence[int] = ()) -> AnsweredTurn:
        """Answer a prompt.

        ``guide`` enforces a grammar and serves this answer only. ``prediction`` is the expected answer, for contenders
        that can draft from it.
        """
        ...

    def fresh(self) -> Contender:
        """Return a copy that has learned nothing from earlier prompts."""
        ...


@dataclass(frozen=True)
class DraftingContender:
    """One of hdtool's methods as a contender."""

    loaded: Loaded
    drafter: Drafter
    sampling: SamplingConfig
    max_new_tokens: int
    new_drafter: Callable[[], Drafter]
    draft_tokens: int | None = None

    def fresh(self) -> DraftingContender:
        return replace(self, drafter=self.new_drafter())

    def answer(self, prompt: list[int], guide: Guide | None = None, prediction: Sequence[int] = ()) -> AnsweredTurn:
        stats, steps = Stats(), list[Step]()
        drafter = guided_drafter(self.drafter, guide, self.draft_tokens)
        decoding = answer_steps(
            self.loaded, drafter, self.sampling, self.max_new_tokens, prompt, masks_of(guide), prediction
        )
        with Stopwatch(self.loaded.target.device) as watch:
            for step in stats.counted(decoding, drafter):
                watch.first_token()
                steps.append(step)
        output_ids = [token for step in steps for token in step.tokens]
        return AnsweredTurn(
            text_of(self.loaded.tokenizer, output_ids),
            output_ids,
            [len(step.tokens) for step in steps],
            watch.seconds,
            finish=str(steps[-1].finish),
            nodes=sum(len(step.tree) for step in steps),
            draft_seconds=stats.draft_seconds,
            model_seconds=stats.verify_seconds,
            drafted_by=[int(source) for step in steps for source in step.sources],
            sources=stats.sources_json(),
            first_seconds=watch.first_seconds,
            cpu_seconds=watch.cpu_seconds,
            waited_seconds=watch.waited_seconds,
        )


def answer_steps(
    loaded: Loaded,
    drafter: Drafter,
    sampling: SamplingConfig,
    max_tokens: int,
    prompt: list[int],
    masks: Sequence[LogitsProcessor] = (),
    prediction: Sequence[int] = (),
) -> Iterator[Step]:
    """Yield the steps of an answer of at most ``max_tokens`` tokens; ``masks`` enforce a grammar.

    Prefix caching is off, because otherwise a contender would profit from prompts that another contender has prefilled.
    """
    sampler, stops = sampler_for(loaded, sampling, prompt, max_new_tokens=max_tokens, first=masks)
    return decode(
        loaded.target,
        prompt,
        sampler,
        max_new_tokens=max_tokens,
        stops=stops,
        drafter=drafter,
        prediction=prediction,
        prefix_caching=False,
    )


class GenerateContender:
    """Transformers' ``generate`` as a contender, with the same stop tokens, length limit and temperature as hdtool.

    Its greedy answers have the same tokens as plain decoding. Its sampled answers differ, because transformers draws
    tokens differently.
    """

    def __init__(
        self, loaded: Loaded, model: PreTrainedModel, sampling: SamplingConfig, max_new_tokens: int, **drafting: Any
    ) -> None:
        """``drafting`` holds the options of ``generate`` for assisted decoding; if empty, nothing is drafted."""
        self._loaded = loaded
        self._model: Any = model
        self._seed = sampling.seed
        self._max_new_tokens = max_new_tokens
        self._drafting = drafting
        refuse_settings(model.generation_config)
        self._sampling = sampling
        self._assistant: Any = drafting.get("assistant_model")
        self._learned: Any = copy.deepcopy(self._assistant.generation_config) if self._assistant else None
        """Generation config of the draft model; between answers, some schedules adapt its number of draft tokens."""
        self._begun: Any = copy.deepcopy(self._learned)

    def fresh(self) -> GenerateContender:
        fresh = copy.copy(self)
        fresh._learned = copy.deepcopy(self._begun)
        return fresh

    def answer(self, prompt: list[int], guide: Guide | None = None, prediction: Sequence[int] = ()) -> AnsweredTurn:
        if self._assistant:
            self._assistant.generation_config = self._learned
        room, at_the_end = room_for(self._loaded.target, prompt, self._max_new_tokens)
        torch.manual_seed(self._seed % 2**63)
        passes = PassCounter(len(prompt))
        generated = partial(
            generate_ids,
            self._loaded,
            self._sampling,
            prompt,
            room,
            model=self._model,
            masks=masks_of(guide),
            **self._drafting,
        )
        # Without drafts every pass gives one token, so the hook is skipped to keep it out of the timing.
        with (
            passes.counted(self._model, enabled=bool(self._drafting)),
            Stopwatch(self._model.device) as watch,
            first_pass_noted(self._model, watch),
        ):
            output_ids = generated()
        return passes.answer(self._loaded, output_ids, watch, at_the_end, drafts=bool(self._drafting))


@contextmanager
def first_pass_noted(model: PreTrainedModel, watch: Stopwatch) -> Iterator[None]:
    """Note the end of the model's first forward pass as the time of the first token; later passes run no hook."""

    def note(*_: Any) -> None:
        hook.remove()
        watch.first_token()

    hook = model.register_forward_hook(note)
    try:
        yield
    finally:
        hook.remove()


def generate_ids(
    loaded: Loaded,
    sampling: SamplingConfig,
    prompt: list[int],
    max_new_tokens: int,
    *,
    model: PreTrainedModel | None = None,
    masks: Sequence[LogitsProcessor] = (),
    **options: Any,
) -> list[int]:
    """Return the token ids that ``generate`` adds to the prompt; ``model``, if given, replaces the loaded target."""
    generator: Any = model or loaded.target.model
    ids = torch.tensor([prompt], device=generator.device)
    if generator.generation_config.stop_strings:
        options = {"tokenizer": loaded.tokenizer, **options}
    if masks:
        options = {"logits_processor": LogitsProcessorList(masks), **options}
    options |= generate_options(sampling, generator.generation_config, loaded.stops, max_new_tokens)
    output = generator.generate(ids, attention_mask=torch.ones_like(ids), **options)
    answer: list[int] = output[0, len(prompt) :].tolist()
    return answer


class PassCounter:
    """Counts the forward passes of ``generate`` or llama.cpp, and the tokens that each pass adds."""

    def __init__(self, prompt_length: int) -> None:
        self._lengths = [prompt_length]
        """Length of the conversation, in tokens, at the start of each pass."""
        self.drafted = 0
        self._first = True

    def note(self, length: int, drafted: int) -> None:
        """Record a pass that verifies ``drafted`` tokens after a conversation of ``length`` tokens."""
        self._lengths.append(length)
        self.drafted += drafted

    def tokens(self, answered: int) -> list[int]:
        """Return the number of tokens that each pass added; ``answered`` is the length of the answer in tokens."""
        ends = [*self._lengths[1:], self._lengths[0] + answered]
        return [end - start for start, end in zip(self._lengths, ends, strict=True)]

    def answer(
        self, loaded: Loaded, output_ids: list[int], watch: Stopwatch, at_the_end: Finish, *, drafts: bool
    ) -> AnsweredTurn:
        """Return the turn answered with ``output_ids``; if ``drafts`` is False, one token per pass is assumed."""
        ended = output_ids[-1] in loaded.stops
        return AnsweredTurn(
            text_of(loaded.tokenizer, output_ids),
            output_ids,
            self.tokens(len(output_ids)) if drafts else [1] * len(output_ids),
            watch.seconds,
            finish=str(Finish.STOP if ended else at_the_end),
            nodes=self.drafted,
            first_seconds=watch.first_seconds,
            cpu_seconds=watch.cpu_seconds,
            waited_seconds=watch.waited_seconds,
        )

    @contextmanager
    def counted(self, model: PreTrainedModel, *, enabled: bool) -> Iterator[None]:
        """Count the forward passes inside ``generate``, and their draft tokens, with a forward pre-hook."""
        hook = model.register_forward_pre_hook(self._note_inputs, with_kwargs=True) if enabled else None
        try:
            yield
        finally:
            if hook:
                hook.remove()

    def _note_inputs(self, model: torch.nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        rows = options["input_ids"].shape[1]
        if self._first:
            self._first = False
            self.drafted += rows - self._lengths[0]
        else:
            # The conversation's last token is not in the KV cache yet, as it is the first input of this pass.
            self.note(cache_in(options).get_seq_length() + 1, rows - 1)
