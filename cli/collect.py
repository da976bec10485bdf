"""``hdtool collect``: the model's own answers to a file of prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hdtool.cli import options
from hdtool.data import demo
from hdtool.data.prompts import read_prompts
from hdtool.runtime.config import DecodeConfig, ModelConfig, SamplingConfig


def collect(
    prompts: Annotated[Path, typer.Option(help="A file of prompts, one a line: text, or JSON as generate takes it.")],
    out: Annotated[Path, typer.Option(help="Where the answers go; run the same command again to go on after a kill.")],
    model: options.Model = ModelConfig.model,
    max_new_tokens: options.MaxNewTokens = 1024,
    batch_size: options.BatchSize = DecodeConfig.batch_size,
    temperature: options.Temperature = SamplingConfig.temperature,
    top_k: options.TopK = SamplingConfig.top_k,
    top_p: options.TopP = SamplingConfig.top_p,
    repetition_penalty: options.RepetitionPenalty = SamplingConfig.repetition_penalty,
    seed: options.Seed = SamplingConfig.seed,
    generation_config: options.GenerationConfig = ModelConfig.generation_config,
    device: options.Device = ModelConfig.device,
    dtype: options.DType = ModelConfig.dtype,
    quantise: options.Quantise = ModelConfig.quantise,
    threads: options.Threads = ModelConfig.threads,
    trust_remote_code: options.TrustRemoteCode = ModelConfig.trust_remote_code,
    chat: options.Chat = None,
    quiet: options.Quiet = False,
) -> None:
    """Collect the model's own answers, to mine a model store from.

    Writes one JSON line for each prompt: id, category, model, settings, messages, answers (ids and how each ended).
    """
    decoding = DecodeConfig(max_new_tokens=max_new_tokens, batch_size=batch_size)
    sampling = SamplingConfig(temperature, top_k, top_p, repetition_penalty, seed)
    asked = read_prompts(prompts)

    from hdtool.builders.collect import GenerationFile
    from hdtool.builders.collect import collect as collected
    from hdtool.cli.output.show_answers import quiet_libraries
    from hdtool.data.progress import bar
    from hdtool.runtime.answerer import Answerer

    quiet_libraries()
    # A file that cannot go on is refused before the model is loaded.
    told = {"model": model or demo.NAME, "temperature": temperature, "seed": seed, "max_new_tokens": max_new_tokens}
    file = GenerationFile(out, told)
    file.check(asked)
    asked_for = ModelConfig(
        model, device, dtype, trust_remote_code, threads, quantise=quantise, generation_config=generation_config
    )
    answerer = Answerer(asked_for, decoding, sampling, chat)
    answerer.check(asked)
    with bar(len(asked), "answers", quiet=quiet) as shown:
        for answered in collected(answerer, asked, file):
            shown.to(answered)
