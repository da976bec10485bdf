"""``hdtool generate``: answer prompts, streaming."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from hdtool.cli.parameters import options
from hdtool.cli.parameters.options import INTERRUPTED
from hdtool.data.errors import OptionError, PromptError
from hdtool.data.prompts import Prompt, read_prompts
from hdtool.runtime.config import DecodeConfig, ModelConfig, SamplingConfig, StoresConfig


def generate(
    prompt: options.Prompt = None,
    prompts: options.Prompts = None,
    chat: options.Chat = None,
    model: options.Model = ModelConfig.model,
    device: options.Device = ModelConfig.device,
    device_map: options.DeviceMap = ModelConfig.device_map,
    dtype: options.DType = ModelConfig.dtype,
    quantization: options.Quantization = ModelConfig.quantization,
    threads: options.Threads = ModelConfig.threads,
    trust_remote_code: options.TrustRemoteCode = ModelConfig.trust_remote_code,
    method: options.Method = DecodeConfig.method,
    model_db: options.ModelDb = StoresConfig.model_db,
    corpus_db: options.CorpusDb = StoresConfig.corpus_db,
    draft_tokens: options.DraftTokens = DecodeConfig.draft_tokens,
    sources: options.Sources = options.ALL_SOURCES,
    order: options.Order = options.ORDER,
    lookahead: options.Lookahead = DecodeConfig.lookahead,
    heads: options.Heads = None,
    tree: options.Tree = DecodeConfig.tree,
    max_new_tokens: options.MaxNewTokens = DecodeConfig.max_new_tokens,
    batch_size: options.BatchSize = DecodeConfig.batch_size,
    temperature: options.Temperature = SamplingConfig.temperature,
    top_k: options.TopK = SamplingConfig.top_k,
    top_p: options.TopP = SamplingConfig.top_p,
    repetition_penalty: options.RepetitionPenalty = SamplingConfig.repetition_penalty,
    seed: options.Seed = SamplingConfig.seed,
    generation_config: options.GenerationConfig = ModelConfig.generation_config,
    stats: options.Stats = False,
    color: options.Color = False,
    as_json: options.Json = False,
) -> int:
    """Answer prompts with a language model.

    Streams the answers to standard output. Drafting changes their speed, not their text. Under torchrun, the processes
    share one model: torchrun --nproc-per-node 2 -m hdtool.cli generate ...
    """
    # Settings are checked before a model is loaded.
    decoding = DecodeConfig(
        method=method,
        max_new_tokens=max_new_tokens,
        draft_tokens=draft_tokens,
        use=sources,
        order=order,
        lookahead=lookahead,
        batch_size=batch_size,
        heads=tuple(heads or ()),
        tree=tree,
    )
    sampling = SamplingConfig(
        temperature=temperature, top_k=top_k, top_p=top_p, repetition_penalty=repetition_penalty, seed=seed
    )
    asked = _asked(prompt, prompts)

    from hdtool.cli.output.show_answers import (
        batch_summary,
        colors_shown,
        legend,
        numbered,
        print_sources,
        quiet_libraries,
        record,
        stream,
        summary,
    )
    from hdtool.runtime.answerer import Answerer

    quiet_libraries()
    store_set = StoresConfig(model_db=model_db, corpus_db=corpus_db)
    loading = ModelConfig(
        model=model,
        device=device,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
        threads=threads,
        device_map=device_map,
        quantization=quantization,
        generation_config=generation_config,
    )
    answerer = Answerer(loading, decoding, sampling, chat, store_set)
    answerer.check(asked)
    print_sources(answerer.store_set)
    color = color and colors_shown()
    if color:
        print(legend(), file=sys.stderr)
    started, tokens, interrupted = time.perf_counter(), 0, False
    for number, answer in numbered(answerer.all_answers(asked)):
        if len(asked) > 1 and not as_json:
            print(f"── {number}/{len(asked)} {answer.prompt.id}", file=sys.stderr)
        stream(answer, show=not as_json, color=color)
        if as_json:
            print(json.dumps(record(answer), ensure_ascii=False), flush=True)
        if stats or answer.interrupted:
            print(summary(answer.stats), file=sys.stderr)
        tokens += answer.stats.tokens
        interrupted |= answer.interrupted
    if stats and batch_size > 1:
        print(batch_summary(tokens, time.perf_counter() - started, batch_size), file=sys.stderr)
    return INTERRUPTED if interrupted else 0


def _asked(prompt: str | None, prompts: Path | None) -> Sequence[Prompt]:
    if prompt is not None and prompts is not None:
        raise OptionError("--prompt and --prompts exclude each other: give one of them")
    if prompts is not None:
        return read_prompts(prompts)
    if prompt is not None:
        return [Prompt.from_text(prompt)]
    if sys.stdin is None or sys.stdin.isatty():
        raise OptionError("nothing to answer: give --prompt TEXT, --prompts FILE, or pipe a prompt in")
    try:
        text = sys.stdin.buffer.read().decode("utf-8-sig")
    except UnicodeDecodeError:
        raise PromptError("standard input is not UTF-8 text: pipe the prompt in as text") from None
    return [Prompt.from_text(text.rstrip("\n"), where="standard input")]
