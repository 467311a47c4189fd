"""Small batches as CUDA graphs on a GPU."""

from __future__ import annotations

import copy

import pytest
import torch
from pylate import losses

import pylate_fastmaxsim
from pylate_fastmaxsim.integrations.models.encoders import encoder_of
from tests.support.losses_cuda import LOSS_SCALE, assert_as_exact, batch_of, losses_of, stock_losses
from tests.support.models import load_model
from tests.support.on_gpu import no_waiting

pytestmark = pytest.mark.cuda


@pytest.fixture
def small(encoder):
    def load(family: str = "modernbert", **changes: object):
        # Local layers see all of a query, so that queries are encoded with the documents.
        changes |= {"local_attention": 24} if family == "modernbert" else {}
        return load_model(
            encoder(family, hidden_size=64, intermediate_size=96, **changes), document_length=48, device="cuda"
        )

    return load


def recorded(model) -> dict:
    return encoder_of(model)._compiled_call_impl._recorded


@pytest.mark.parametrize(
    ("family", "checkpointing", "dtype"),
    [
        ("modernbert", False, torch.bfloat16),
        ("modernbert", True, torch.bfloat16),
        ("bert", False, torch.float16),
        ("qwen3", False, torch.bfloat16),
    ],
)
def test_losses_and_gradients_are_as_exact_as_stock(small, family, checkpointing, dtype):
    model = small(family)
    batches = [batch_of(model, seed=seed, count=count) for seed, count in enumerate((15, 11, 15, 15, 11, 11))]
    expected = stock_losses(model, batches, autocast=dtype)
    if checkpointing:
        model[0].auto_model.gradient_checkpointing_enable({"use_reentrant": False})
    with pylate_fastmaxsim.enabled(compile=True, stock_masking=True):
        for _ in range(3):
            ours = losses_of(model, batches, autocast=dtype)
            assert_as_exact(ours, expected)
        assert recorded(model)
        # The same batches again: what was kept of the last ones changes nothing.
        again = losses_of(model, batches, autocast=dtype)
        assert again[0].equal(ours[0])


def test_dropout_is_drawn_anew_and_repeats_with_its_seed(small):
    model = small("bert", hidden_dropout_prob=0.2, attention_probs_dropout_prob=0.2).train()
    batch = batch_of(model)
    with pylate_fastmaxsim.enabled(compile=True):
        for _ in range(3):
            losses_of(model, [batch])
        assert recorded(model)
        torch.manual_seed(3)
        first, second = losses_of(model, [batch]), losses_of(model, [batch])
        torch.manual_seed(3)
        again = losses_of(model, [batch])
    assert first[0] != second[0] and first[0] == again[0]
    for name in first[1]:  # FlashAttention adds gradients in an order that varies
        torch.testing.assert_close(first[1][name], again[1][name], rtol=0.02, atol=1e-3)


def test_dropout_below_checkpoints_says_why_it_runs_without_graphs(small, caplog):
    model = small("bert", hidden_dropout_prob=0.1).train()
    model[0].auto_model.gradient_checkpointing_enable({"use_reentrant": False})
    batch = batch_of(model)
    with pylate_fastmaxsim.enabled(compile=True):
        for _ in range(4):
            _, gradients = losses_of(model, [batch])
    assert all(gradient.isfinite().all() for gradient in gradients.values())
    assert "gradient checkpointing repeats the random numbers of dropout" in caplog.text


def test_weights_are_read_when_graphs_run(small):
    """An optimizer changes them in place; what autocast keeps of them must not be recorded."""
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    batches = [batch_of(model, seed=seed) for seed in range(2)]
    # Each step has a reference with its own weights: after eight steps apart, rounding alone is 5% of a loss.
    weights, ours, expected = [], [], []
    with pylate_fastmaxsim.enabled(compile=True, stock_masking=True):
        for step in range(8):
            weights.append(copy.deepcopy(model.state_dict()))
            value, _ = losses_of(model, batches[step % 2 :][:1])
            for weight in model.parameters():
                weight.grad /= LOSS_SCALE
            optimizer.step()
            ours.append(value)
        assert recorded(model)
    with pylate_fastmaxsim.enabled(stock_masking=True):
        for step, state in enumerate(weights):
            model.load_state_dict(state)
            expected.append(losses_of(model, batches[step % 2 :][:1])[0])
    assert abs(expected[0] - expected[6]) > 0.1 * expected[0]
    torch.testing.assert_close(ours, expected, rtol=0.02, atol=0)


def test_a_step_waits_for_nothing(small):
    model = small()
    pylate_fastmaxsim.enable(compile=True)
    batch, loss_function = batch_of(model), losses.Contrastive(model)

    def step():
        with torch.autocast("cuda", torch.bfloat16):
            loss = loss_function([dict(column) for column in batch], None)
        loss.backward()

    for _ in range(3):
        step()
    assert recorded(model)
    torch.cuda.synchronize()
    with no_waiting():
        step()


def test_memory_of_graphs_is_shared_and_freed(small):
    model = small(num_hidden_layers=6)
    few, many = (batch_of(model, count=count) for count in (60, 90))
    with pylate_fastmaxsim.enabled(compile=True):
        for batch in (many, many, many, few):
            losses_of(model, [batch])
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        for _ in range(3):
            losses_of(model, [few])
        assert len(recorded(model)) == 2
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() - before < 2**24
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() < before
