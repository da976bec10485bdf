"""``hdtool collect``: the model's own answers to a file of prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from hdtool.cli.parameters import options
from hdtool.cli.parameters.command import INPUT, OUTPUT, option
from hdtool.data import demo
from hdtool.data.prompts import read_prompts
from hdtool.runtime.config import DecodeConfig, ModelConfig, SamplingConfig


def collect(
    prompts: Annotated[Path, option(INPUT, "File of prompts, one per line: text, or JSON as generate takes it.")],
    out: Annotated[Path, option(OUTPUT, "File of the answers; the same command resumes an interrupted run.")],
    chat: options.Chat = None,
    model: options.Model = ModelConfig.model,
    device: options.Device = ModelConfig.device,
    dtype: options.DType = ModelConfig.dtype,
    quantization: options.Quantization = ModelConfig.quantization,
    threads: options.Threads = ModelConfig.threads,
    trust_remote_code: options.TrustRemoteCode = ModelConfig.trust_remote_code,
    max_new_tokens: options.MaxNewTokens = 1024,
    batch_size: options.BatchSize = DecodeConfig.batch_size,
    temperature: options.Temperature = SamplingConfig.temperature,
    top_k: options.TopK = SamplingConfig.top_k,
    top_p: options.TopP = SamplingConfig.top_p,
    repetition_penalty: options.RepetitionPenalty = SamplingConfig.repetition_penalty,
    seed: options.Seed = SamplingConfig.seed,
    generation_config: options.GenerationConfig = ModelConfig.generation_config,
    quiet: options.Quiet = False,
) -> None:
    """Collect a model's answers for a model store.

    Writes one JSON line for each prompt: id, category, model, settings, messages, answers (ids and how each ended).
    """
    decoding = DecodeConfig(max_new_tokens=max_new_tokens, batch_size=batch_size)
    sampling = SamplingConfig(
        temperature=temperature, top_k=top_k, top_p=top_p, repetition_penalty=repetition_penalty, seed=seed
    )
    asked = read_prompts(prompts)

    from hdtool.builders.collect import GenerationFile
    from hdtool.builders.collect import collect as collected
    from hdtool.cli.output.show_answers import quiet_libraries
    from hdtool.data.progress import bar
    from hdtool.runtime.answerer import Answerer

    quiet_libraries()
    # A file that cannot be resumed is refused before the model is loaded.
    written = {"model": model or demo.NAME, "temperature": temperature, "seed": seed, "max_new_tokens": max_new_tokens}
    file = GenerationFile(out, written)
    file.check(asked)
    loading = ModelConfig(
        model=model,
        device=device,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
        threads=threads,
        quantization=quantization,
        generation_config=generation_config,
    )
    answerer = Answerer(loading, decoding, sampling, chat)
    answerer.check(asked)
    with bar(len(asked), "answers", quiet=quiet) as shown:
        for answered in collected(answerer, asked, file):
            shown.to(answered)
