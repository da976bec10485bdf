"""Rollouts inside TRL's GRPOTrainer: the samples of plain decoding, in fewer passes. It runs where TRL is installed."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hdtool.data import demo
from hdtool.runtime.integrations.hf_generate import Generator
from hdtool.runtime.settings.decoding import DecodeConfig, StoresConfig

PROMPTS = ["Tom has 3 boxes with 12 pencils each. How many pencils", "def add(a, b):"]
EPOCHS = 3


def trained(generator: Generator, folder: Path) -> tuple[list[torch.Tensor], int]:
    """The outputs of all calls of ``generate`` in a training, and their passes."""
    trl: Any = pytest.importorskip("trl")
    datasets: Any = pytest.importorskip("datasets")
    tokenizer = AutoTokenizer.from_pretrained(demo.MODEL)
    tokenizer.pad_token = tokenizer.eos_token
    model: Any = AutoModelForCausalLM.from_pretrained(demo.MODEL)
    drafting, outputs, passes = partial(model.generate, custom_generate=generator), list[torch.Tensor](), 0

    def generate(*arguments: Any, **options: Any) -> torch.Tensor:
        nonlocal passes
        outputs.append(drafting(*arguments, **options))
        passes += generator.stats.steps
        return outputs[-1]

    model.generate = generate
    settings = trl.GRPOConfig(
        output_dir=str(folder),
        per_device_train_batch_size=4,
        num_generations=4,
        num_train_epochs=EPOCHS,
        max_completion_length=32,
        temperature=0.7,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
        seed=1,
    )
    trl.GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [float(len(set(text))) for text in completions],
        args=settings,
        train_dataset=datasets.Dataset.from_dict({"prompt": PROMPTS}),
        processing_class=tokenizer,
    ).train()
    return outputs, passes


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_a_training_has_the_samples_of_plain_decoding(tmp_path: Path) -> None:
    plain, passes_of_plain = trained(Generator(), tmp_path / "plain")
    none = StoresConfig("none", "none")
    tokenizer = AutoTokenizer.from_pretrained(demo.MODEL)
    drafting = Generator.drafting(tokenizer, DecodeConfig(draft_tokens=16), none, rollouts=100_000)
    drafted, passes = trained(drafting, tmp_path / "drafted")
    assert len(plain) == len(drafted) == EPOCHS * len(PROMPTS)
    assert all(map(torch.equal, plain, drafted))
    assert passes < 0.9 * passes_of_plain
