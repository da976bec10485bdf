"""LoRA adapters of PEFT on a model that answers by `custom_generate`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from hdtool import Generator
from hdtool.cli.app import run
from hdtool.data import demo
from tests.support.oracle import prompt_of

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # by peft
LORA = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)


@pytest.fixture
def adapted() -> Any:
    torch.manual_seed(0)
    return get_peft_model(AutoModelForCausalLM.from_pretrained(demo.MODEL), LORA).eval()


def test_answers_follow_the_active_adapter(adapted: Any) -> None:
    drafting = Generator.drafting(AutoTokenizer.from_pretrained(demo.MODEL))
    prompt = torch.tensor([prompt_of(20)])

    def answers(model: Any) -> list[int]:
        """Return the answer with drafts, after comparing it with the one without."""
        settings: dict[str, Any] = {"do_sample": False, "max_new_tokens": 40}
        plain = model.generate(prompt, **settings)
        assert torch.equal(plain, model.generate(prompt, **settings, custom_generate=drafting))
        return list(map(int, plain[0]))

    first = answers(adapted)
    with adapted.disable_adapter():
        base = answers(adapted)
    adapted.add_adapter("second", LORA)
    adapted.set_adapter("second")
    second = answers(adapted)
    adapted.set_adapter("default")
    assert answers(adapted) == first and len({tuple(first), tuple(base), tuple(second)}) == 3
    assert answers(adapted.merge_and_unload())


def test_a_folder_with_an_adapter_alone(adapted: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    adapted.save_pretrained(tmp_path)
    assert run(["generate", "hi", "--model", str(tmp_path)]) == 1
    assert f"{tmp_path} holds an adapter without its model: merge them by peft's" in capfd.readouterr().err
