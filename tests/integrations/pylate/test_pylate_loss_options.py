"""Every constructor option of the losses against stock; and what a packed loss must not do on the way."""

from __future__ import annotations

import inspect
from unittest import mock

import pytest
import torch
from pylate import losses

import pylate_fastmaxsim
from pylate_fastmaxsim import _winners
from pylate_fastmaxsim.integrations.encoding import modes
from pylate_fastmaxsim.integrations.encoding.plans import unit
from pylate_fastmaxsim.integrations.pylate import losses as pylate_losses
from pylate_fastmaxsim.ops.maxsim import maxsim
from tests.support.compared import assert_equal, batch_for, batch_of, run
from tests.support.models import load_model


@pytest.fixture
def model(encoder):
    # Its local layers see all of a query, so that queries are encoded with packed documents.
    return load_model(encoder("modernbert", local_attention=24))


CONTRASTIVE = [{"size_average": False}, {"temperature": 0.05, "gather_across_devices": True}]
OPTIONS = {
    losses.Contrastive: [*CONTRASTIVE, {"score_mini_batch_size": 4}, {"score_mini_batch_size": 100}],
    losses.CachedContrastive: [
        *CONTRASTIVE,
        {"mini_batch_size": 1, "show_progress_bar": True},
        {"mini_batch_size": 3, "score_mini_batch_size": 2, "size_average": False},
    ],
    losses.Distillation: [{"size_average": False}, {"normalize_scores": False}],
}


@pytest.mark.parametrize("loss_class", OPTIONS)
def test_every_option_is_compared(loss_class):
    # Options of later versions of PyLate are added here; those of earlier ones are a part. A metric has tests of its own.
    options = set(inspect.signature(loss_class).parameters) - {"model", "score_metric"}
    assert options <= set().union(*OPTIONS[loss_class])


@pytest.mark.parametrize(
    "loss_class, options", [(loss_class, options) for loss_class, every in OPTIONS.items() for options in every]
)
def test_options(model, packed, loss_class, options):
    model = model.double()
    batch, labels = batch_for(loss_class, model)
    loss_function = loss_class(model, **options)
    stock = run(loss_function, batch, labels)
    with pylate_fastmaxsim.enabled(stock_masking=True):
        assert_equal(run(loss_function, batch, labels), stock)
        assert set(modes.chosen[model].values()) == {"packed"}
        if loss_class is losses.Contrastive:
            assert set(modes.joined[model].values()) == {True}


@pytest.mark.parametrize("size", [0, 2.5])
def test_gradcache_without_a_size_of_mini_batches(model, size):
    pylate_fastmaxsim.enable()
    with pytest.raises(ValueError, match=f"mini_batch_size must be an integer of at least 1, got {size}"):
        losses.CachedContrastive(model, mini_batch_size=size)(batch_of(model))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_gradcache_in_chunks_of_queries(model, monkeypatch, dtype):
    model = model.to(dtype)
    loss_function = losses.CachedContrastive(model, mini_batch_size=2)
    batch = batch_of(model)
    pylate_fastmaxsim.enable()
    at_once = run(loss_function, batch)
    monkeypatch.setattr(_winners, "_AT_ONCE_BYTES", 1)
    with mock.patch.object(pylate_losses, "maxsim", wraps=maxsim) as scored:
        in_chunks = run(loss_function, batch)
    assert scored.call_count == 3
    assert_equal(in_chunks, at_once, 1e-10 if dtype == torch.float64 else 0.02)


@pytest.mark.parametrize("loss_class", OPTIONS)
# Only on a GPU does autocast make a normalised copy float32.
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_all_documents_are_scored_by_one_launch_without_padding_in_the_autocast_dtype(
    encoder, packed, loss_class, device
):
    model = load_model(encoder("modernbert"), device=device)
    batch, labels = batch_for(loss_class, model)
    labels = None if labels is None else labels.to(device)
    loss_function = loss_class(model, **({"mini_batch_size": 4} if loss_class is losses.CachedContrastive else {}))
    pylate_fastmaxsim.enable()
    with (
        torch.autocast(device, torch.bfloat16),
        mock.patch.object(pylate_losses, "maxsim", wraps=maxsim) as scored,
    ):
        loss_function(batch, labels).backward()
    assert scored.call_count == 1
    queries, documents = scored.call_args.args[:2]
    assert queries.values.dtype == documents.values.dtype == torch.bfloat16
    assert len(documents.values) == sum(int(column["attention_mask"].sum()) for column in batch[1:])
    assert len(documents) == sum(len(column["input_ids"]) for column in batch[1:])


def test_gradcache_follows_a_loss_scaled_by_what_bfloat16_cannot_say(model):
    # As of steps of accumulation: the factor is applied in float32 and not rounded first, here to 1, 0.3% less.
    loss_function = losses.CachedContrastive(model, mini_batch_size=4)
    batch = batch_of(model)
    pylate_fastmaxsim.enable()
    gradients = []
    for factor in [1.0, *(1 + excess / 1e4 for excess in range(30, 39))]:
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_function(batch)
        (loss * factor).backward()
        gradients.append(torch.cat([weight.grad.flatten() / factor for weight in model.parameters()]))
    # Each is off by 0.1% at random, because the encoder's gradients are rounded otherwise.
    along = torch.stack(gradients[1:]).mean(0).dot(gradients[0]) / gradients[0].square().sum()
    assert abs(along - 1) < 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_unit_is_what_normalising_in_float32_and_rounding_gives(dtype):
    embeddings = torch.randn(2, 5, 16, dtype=torch.float64).to(dtype)
    embeddings[0, 0] = 0
    embeddings = embeddings.transpose(0, 1).requires_grad_()
    gradient = torch.randn(5, 2, 16).bfloat16()
    exact = embeddings.detach().double().requires_grad_()
    expected = torch.nn.functional.normalize(exact, dim=-1)
    expected.backward(gradient.double())
    with torch.autocast("cpu", torch.bfloat16):
        ours = unit(embeddings)
    ours.backward(gradient)
    assert ours.dtype == torch.bfloat16 and embeddings.grad.dtype == dtype
    torch.testing.assert_close(ours.double(), expected.detach(), rtol=2**-8, atol=0)
    live = exact.grad.abs() < 1e6  # what is left of a vector of zeros is its gradient over the bound
    scale = exact.grad[live].abs().max().item()
    torch.testing.assert_close(
        embeddings.grad.double()[live],
        exact.grad[live],
        rtol=2**-7 if dtype == torch.bfloat16 else 1e-5,
        atol=1e-6 * scale,
    )
    torch.testing.assert_close(embeddings.grad.double()[~live], exact.grad[~live], rtol=2**-7, atol=0)
