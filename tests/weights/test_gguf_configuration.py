"""The configuration and tokenizer of a GGUF file are those that transformers reads from the whole file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGUFWriter, TokenType
from transformers import AutoConfig, AutoTokenizer

from hdtool.data.errors import ModelError
from hdtool.runtime.weights.gguf_configuration import write_configuration
from hdtool.runtime.weights.gguf_file import GGUFFile
from hdtool.runtime.weights.gguf_settings import LLAMA_3
from tests.support.gguf_files import END_OF_TEXT, END_OF_TURN, add_tokenizer, tiny_llama, write_gguf, written
from tests.support.gpt_oss_gguf import write_gpt_oss

SIZE = 300
"""Number of tokens."""
BYTE_LEVEL = (
    "llama", "qwen2", "qwen2moe", "qwen3", "qwen3moe", "lfm2", "falcon", "bloom", "stablelm", "gpt2", "starcoder2",
    "mamba", "minimax-m2", "qwen35", "qwen35moe",
)  # fmt: skip
SENTENCE_PIECES = ("llama", "mistral", "phi3", "nemotron", "gemma2", "gemma3", "gemma4")
PER_LAYER = [0, 2]
"""Numbers of key-value heads of LFM2, whose first layer is a convolution."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
INTEGERS = {
    "context_length": 512, "embedding_length": 64, "block_count": 2, "feed_forward_length": 96,
    "attention.head_count": 4, "attention.key_length": 16, "attention.value_length": 16,
    "attention.sliding_window": 128, "rope.dimension_count": 16, "expert_count": 4, "expert_used_count": 2,
    "expert_feed_forward_length": 32, "expert_shared_feed_forward_length": 32, "full_attention_interval": 2,
    "ssm.conv_kernel": 4, "ssm.state_size": 16, "ssm.inner_size": 64, "ssm.time_step_rank": 4, "ssm.group_count": 2,
    "shortconv.l_cache": 3,
}  # fmt: skip


def write(path: Path, architecture: str, *, pieces: bool = False, states_size: bool = True) -> Path:
    """Write a file with the settings of all architectures and two tensors.

    The names of tensors tell transformers which biases a model has, and whether its embedding is tied.
    """
    path.parent.mkdir(exist_ok=True)
    stored = "llama" if architecture == "mistral" else architecture
    writer = GGUFWriter(path, stored)
    writer.add_name(architecture)
    for name, number in INTEGERS.items():
        writer.add_uint32(f"{stored}.{name}", number)
    writer.add_head_count_kv(PER_LAYER if architecture == "lfm2" else 2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_layer_norm_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_array(f"{stored}.rope.dimension_sections", [2, 3, 3, 0])
    if states_size:
        writer.add_vocab_size(SIZE + 20)
    if pieces:
        add_pieces(writer)
    else:
        add_tokenizer(writer, SIZE)
    writer.add_tensor("blk.0.attn_q.bias" if states_size else "output.weight", np.zeros((SIZE, 64), np.float16))
    writer.add_tensor("token_embd.weight", np.zeros((SIZE, 64), np.float32))
    return written(writer, path)


def add_pieces(writer: GGUFWriter) -> None:
    marks = ["<unk>", "<s>", "</s>", "\u2581"]
    tokens = [*marks, *(f"{chr(97 + number % 26)}" + "\u2581" * (number // 26) for number in range(SIZE - len(marks)))]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([-float(number) for number in range(SIZE)])
    writer.add_token_types([TokenType.CONTROL] * 3 + [TokenType.NORMAL] * (SIZE - 3))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template("{{ messages }}")


def made(file: Path) -> Path:
    folder = file.parent / "made"
    folder.mkdir()
    write_configuration(GGUFFile.open(file), folder)
    return folder


def assert_alike(tokenizer: Any, other: Any) -> None:
    """Check that two tokenizers have the same vocabulary, rules and settings, and do the same to texts."""
    assert type(tokenizer) is type(other)
    assert tokenizer.backend_tokenizer.to_str() == other.backend_tokenizer.to_str()
    assert settings_of(tokenizer) == settings_of(other)
    for text in texts(tokenizer):
        for special in (True, False):
            ids = tokenizer(text, add_special_tokens=special)["input_ids"]
            assert ids == other(text, add_special_tokens=special)["input_ids"]
            assert tokenizer.decode(ids, skip_special_tokens=special) == other.decode(ids, skip_special_tokens=special)


def settings_of(tokenizer: Any) -> dict[str, str]:
    """Return all that a tokenizer holds besides its place and its backend."""
    held = vars(tokenizer) | tokenizer.init_kwargs
    return {
        name: repr(value) for name, value in held.items() if name not in ("_tokenizer", "init_kwargs", "name_or_path")
    }


def texts(tokenizer: Any) -> list[str]:
    """Return texts of random characters, words, white space and special tokens."""
    random = np.random.default_rng(0)
    parts = [
        *tokenizer.all_special_tokens,
        *tokenizer.added_tokens_encoder,
        *("  ", "\n\n", "\t", " .", " n't", "def f(x):", "\u2581", "don't", "12345", "\u00e9", "e\u0301", "\u4e16"),
        *(chr(point) for point in random.integers(0x20, 0x1FAFF, size=300) if not 0xD800 <= point < 0xE000),
    ]
    return ["".join(random.choice(parts, size=12)) for _ in range(60)]


def stated(folder: Path, name: str = "config.json") -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / name).read_text())
    return content


@pytest.mark.parametrize(
    ("architecture", "pieces"),
    [*((name, False) for name in BYTE_LEVEL), *((name, True) for name in SENTENCE_PIECES)],
)
def test_files_are_those_that_transformers_makes(architecture: str, pieces: bool, tmp_path: Path) -> None:
    expected = tmp_path / "expected"
    for states_size in (True, False):
        file = write(tmp_path / f"{states_size}" / "tiny.gguf", architecture, pieces=pieces, states_size=states_size)
        folder = made(file)
        settings = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
        settings.dtype, settings.architectures = "float16", stated(folder)["architectures"]
        settings.save_pretrained(expected)
        assert (folder / "config.json").read_bytes() == (expected / "config.json").read_bytes()
        assert settings.vocab_size in (SIZE, SIZE + 20) if states_size else settings.vocab_size == SIZE
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(expected)
    for name in TOKENIZER_FILES:
        text, librarys = ((place / name).read_text() for place in (folder, expected))
        if name == "tokenizer_config.json":  # the settings hold the added tokens besides
            assert json.loads(librarys).items() <= json.loads(text).items()
        else:
            assert text == librarys or json.loads(text) == json.loads(librarys)
    assert_alike(*map(AutoTokenizer.from_pretrained, (folder, expected)))
    assert {path.name for path in folder.iterdir()} == {*TOKENIZER_FILES, "config.json", "generation_config.json"}


def test_the_library_gguf_reads_no_vocabulary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes about 30 microseconds per value."""
    file, sizes = write(tmp_path / "tiny.gguf", "llama"), []

    class Reader(gguf.GGUFReader):
        def __init__(self, path: Any) -> None:
            super().__init__(path)
            sizes.append(max(len(field.parts) for field in self.fields.values()))

    monkeypatch.setattr(gguf, "GGUFReader", Reader)
    made(file)
    assert sizes and max(sizes) < 16


def test_a_token_that_ends_a_turn_ends_the_answer(tmp_path: Path) -> None:
    settings = {"tokenizer.ggml.eot_token_id": END_OF_TURN, "tokenizer.ggml.eom_token_id": END_OF_TURN}
    folder = made(write_gguf(tmp_path / "tiny.gguf", tiny_llama(), settings=settings))
    for name in ("config.json", "generation_config.json"):
        assert stated(folder, name)["eos_token_id"] == [END_OF_TEXT, END_OF_TURN]


def test_scaled_rotary_positions_of_llama_3(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The file has the divisors of the frequencies, which transformers does not read."""
    rope = {"rope_type": "llama3", "rope_theta": 500_000.0, "factor": 32.0, **LLAMA_3}
    scaled = tiny_llama(rope_parameters=rope)
    plain = tiny_llama(rope_parameters={"rope_type": "default", "rope_theta": 500_000.0})
    divisors = (plain.model.rotary_emb.inv_freq / scaled.model.rotary_emb.inv_freq).numpy()
    folder = made(write_gguf(tmp_path / "scaled.gguf", scaled, divisors=divisors))
    assert stated(folder)["rope_parameters"] == rope and "rotary" not in capfd.readouterr().err
    yarn: dict[str, int | str] = {"llama.rope.scaling.type": "yarn"}
    for number, (changed, what) in enumerate(
        (({"divisors": np.sqrt(divisors)}, "rope_freqs.weight"), ({"settings": yarn}, "of type yarn"))
    ):
        (tmp_path / f"{number}").mkdir()
        folder = made(write_gguf(tmp_path / f"{number}" / "other.gguf", scaled, **changed))
        assert stated(folder)["rope_parameters"]["rope_type"] == "default"
        assert f"scales its rotary positions ({what}), which" in capfd.readouterr().err


def test_gpt_oss(tmp_path: Path) -> None:
    original = write_gpt_oss(tmp_path / "oss.gguf").config
    folder = made(tmp_path / "oss.gguf")
    found = AutoConfig.from_pretrained(folder).to_dict()
    others = {"dtype", "initializer_range", "_name_or_path", "_model_name_or_path", "architectures", "eos_token_id"}
    assert {name: found[name] for name in original.to_dict().keys() - others} == {
        name: value for name, value in original.to_dict().items() if name not in others
    }
    assert stated(folder, "generation_config.json")["eos_token_id"] == [END_OF_TURN, END_OF_TEXT]


def test_a_model_that_transformers_does_not_read(tmp_path: Path) -> None:
    for architecture, reason in (
        ("rwkv7", "GGUF model with architecture rwkv7 is not supported yet"),
        ("t5", "a model of type t5 does not generate text token by token"),
    ):
        file = write(tmp_path / architecture / "tiny.gguf", architecture)
        with pytest.raises(ModelError, match=f"cannot read the configuration of .*{architecture} \\({reason}\\)"):
            made(file)


def test_a_tokenizer_that_transformers_does_not_read(tmp_path: Path) -> None:
    file = write(tmp_path / "tiny.gguf", "llama")
    file.write_bytes(file.read_bytes().replace(b"gpt2", b"gpt3"))
    with pytest.raises(ModelError, match=r"cannot read the tokenizer of .* \(.*'gpt3'\)"):
        made(file)
    assert not [path for path in (tmp_path / "made").iterdir() if path.is_dir()]
