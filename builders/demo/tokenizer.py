"""The demo model's tokenizer and chat format."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from hdtool.builders.demo.corpus import Document

TEXT_START, USER, ASSISTANT, TURN_END = "<|endoftext|>", "<|user|>", "<|assistant|>", "<|end|>"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def train_tokenizer(texts: Iterable[str], vocabulary: int, context: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE; each digit is a token, so that numbers are tokenized uniformly."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[TEXT_START, TURN_END, USER, ASSISTANT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    start = (TEXT_START, bpe.token_to_id(TEXT_START))
    bpe.post_processor = processors.TemplateProcessing(single=f"{TEXT_START} $A", special_tokens=[start])
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=TEXT_START,
        eos_token=TURN_END,
        pad_token=TEXT_START,
        additional_special_tokens=[USER, ASSISTANT],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=context,
    )


def as_text(document: Document) -> str:
    if not document.question:
        return TEXT_START + document.answer
    return f"{TEXT_START}{USER}{document.question}{TURN_END}{ASSISTANT}{document.answer}{TURN_END}"
