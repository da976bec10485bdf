"""Memory of outputs is used again once nobody holds it, and never while somebody does."""

from __future__ import annotations

import torch

from hdtool.runtime.kernels.output_memory import SMALLEST, OutputMemory
from hdtool.runtime.kernels.small_batch_linear import SmallBatchLinear, use_small_batch_products
from tests.support.families import model_of

ROWS, OUTS = 4, SMALLEST // 4
LIKE = torch.zeros(1)


def test_an_output_that_somebody_holds_is_not_overwritten() -> None:
    memory = OutputMemory()
    held = [memory.room_for(ROWS, OUTS, LIKE).fill_(number) for number in range(5)]
    views = [memory.room_for(ROWS, OUTS, LIKE).fill_(5)[1], memory.room_for(ROWS, OUTS, LIKE).fill_(6)[0].numpy()]
    memory.room_for(ROWS, OUTS, LIKE).fill_(9)
    assert [float(one.mean()) for one in held] == [0, 1, 2, 3, 4]
    assert [float(view.mean()) for view in views] == [5, 6]


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
                layer.choice._own[torch.get_num_threads()] = (own,) * 65
                found = layer(inputs)
                assert found.shape == expected.shape
                assert torch.equal(found, expected) if not own else torch.allclose(found, expected, atol=1e-5)


def test_only_the_output_layer_keeps_memory() -> None:
    model = model_of("llama")
    use_small_batch_products(model)
    kept = [layer for layer in model.modules() if isinstance(layer, SmallBatchLinear) and layer.memory]
    assert kept in ([], [model.get_output_embeddings()])
