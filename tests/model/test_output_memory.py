"""Memory of outputs is used again once nobody holds it, and never while somebody does."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hdtool.runtime.kernels.memory.output_memory import SMALLEST, OutputMemory
from hdtool.runtime.kernels.small_batch_linear import ProductChoice, SmallBatchLinear, use_small_batch_products

ROWS, OUTS = 4, SMALLEST // 4
LIKE = torch.zeros(1)


def test_an_output_that_somebody_holds_is_not_overwritten() -> None:
    memory = OutputMemory()
    held = [memory.room_for(ROWS, OUTS, LIKE).fill_(number) for number in range(5)]
    view = memory.room_for(ROWS, OUTS, LIKE).fill_(5)[1]
    array = memory.room_for(ROWS, OUTS, LIKE).fill_(6)[0].numpy()
    memory.room_for(ROWS, OUTS, LIKE).fill_(9)
    assert [float(one.mean()) for one in held] == [0, 1, 2, 3, 4]
    assert [float(view.mean()), float(array.mean())] == [5, 6]


def test_an_output_that_nobody_holds_is_overwritten() -> None:
    memory = OutputMemory()
    first = memory.room_for(ROWS, OUTS, LIKE).data_ptr()
    last = memory.room_for(ROWS, OUTS, LIKE)
    assert last.data_ptr() == first
    other = memory.room_for(ROWS - 1, OUTS + 1, LIKE)
    assert other.data_ptr() != first and other.shape == (ROWS - 1, OUTS + 1)
    del last
    assert memory.room_for(1, SMALLEST, LIKE).data_ptr() == first


def test_the_output_layer_gives_the_numbers_of_torch() -> None:
    torch.manual_seed(0)
    with torch.no_grad():
        for rows in (1, 4, 33):
            layer = torch.nn.Linear(64, SMALLEST, bias=False)
            inputs = torch.randn(1, rows, 64)
            expected = layer(inputs)
            model = torch.nn.ModuleList([layer])
            use_small_batch_products(model)
            assert isinstance(layer, SmallBatchLinear)
            layer.memory = OutputMemory()
            for own in (False, True):
                layer.choice = ProductChoice(64, own)
                found = layer(inputs)
                assert found.shape == expected.shape
                assert torch.equal(found, expected) if not own else torch.allclose(found, expected, atol=1e-5)


def test_only_an_output_layer_keeps_memory() -> None:
    model = LlamaForCausalLM(LlamaConfig(hidden_size=64, intermediate_size=64, num_hidden_layers=1, vocab_size=128))
    use_small_batch_products(model)
    linear = [layer for layer in model.modules() if isinstance(layer, SmallBatchLinear)]
    assert [layer for layer in linear if layer.memory] == [model.get_output_embeddings()] and len(linear) > 1
