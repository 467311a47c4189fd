"""GradCache of PyLate's losses: what it holds, how it divides texts, and how it adds gradients up."""

import gc

import pytest
import torch
from pylate import losses
from torch.nn import functional as F

import pylate_fastmaxsim
from pylate_fastmaxsim.integrations.encoding.gradcache import losses_of_chunks
from pylate_fastmaxsim.integrations.pylate import losses as pylate_losses
from pylate_fastmaxsim.ops.maxsim import maxsim
from pylate_fastmaxsim.tokens import TokenBatch
from tests.support.compared import assert_as_stock, assert_equal, batch_of, run
from tests.support.hosts import operators
from tests.support.models import features, load_model, looking, sentences


def test_a_call_never_holds_more_tokens_than_a_mini_batch(model, mode):
    loss_function = losses.CachedContrastive(model, mini_batch_size=2)
    batch, shapes = batch_of(model, queries=16), []
    pylate_fastmaxsim.enable()
    run(loss_function, batch)
    model[0].register_forward_pre_hook(looking(lambda _module, args: shapes.append(args[0]["input_ids"].shape)))
    run(loss_function, batch)
    assert max(shape.numel() for shape in shapes) <= 2 * 32
    assert len(shapes) < 2 * (3 * 8)
    # Two documents of 32 tokens are as much as five queries of 12, so that 16 take four calls, in each of two passes.
    if mode == "grouped":
        assert [shape[0] for shape in shapes if shape[1] == 12] == 2 * [4, 4, 4, 4]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 5e-3), (torch.float16, 5e-4)], ids=str)
def test_gradients_of_many_chunks_are_summed_in_float32(dtype, tolerance, device):
    """Of a model that leaves embeddings in 16 bits; each chunk is one query."""
    torch.manual_seed(0)
    queries = F.normalize(torch.randn(256, 4, 16), dim=-1).to(device, dtype)
    documents = F.normalize(torch.randn(8, 3, 16), dim=-1).to(device, dtype)
    targets = torch.arange(256, device=device) % 8

    def gradient(dtype):
        batch = TokenBatch.from_padded(documents.to(dtype))
        batch.values.requires_grad_()

        def loss_of(chunk, values):
            scores = maxsim(TokenBatch.from_padded(queries[chunk].to(dtype)), batch.with_values(values))
            return F.cross_entropy(scores, targets[chunk], reduction="sum")

        losses_of_chunks(batch.values, 256, (slice(place, place + 1) for place in range(256)), loss_of)
        assert batch.values.grad.dtype == dtype
        return batch.values.grad.float()

    exact = gradient(torch.float32)
    assert (gradient(dtype) - exact).norm() < tolerance * exact.norm()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_chunks_of_queries(model, monkeypatch, dtype):
    model = model.to(dtype)
    loss_function, batch = losses.CachedContrastive(model, mini_batch_size=2), batch_of(model)
    pylate_fastmaxsim.enable()
    at_once = run(loss_function, batch)
    monkeypatch.setattr(pylate_losses, "queries_at_once", lambda *_: 1)  # else a batch of gigabytes
    scored = operators((pylate_losses, "maxsim"))(model, monkeypatch)
    in_chunks = run(loss_function, batch)
    assert len(scored) == 3  # of two queries each, as the loss asks for
    assert_equal(in_chunks, at_once, 1e-10 if dtype == torch.float64 else 0.02)


def test_embeddings_and_their_gradient_are_held_once(model, packed, monkeypatch):
    """Each is as large as all documents, so that of large batches nothing else counts."""
    monkeypatch.setattr(pylate_losses, "queries_at_once", lambda *_: 1)  # else a batch of gigabytes
    size = model(features(model, sentences(1))[0])["token_embeddings"].shape[-1]
    held = []

    def bytes_held(queries, documents, *args, **kwargs):
        tensors = [value for value in gc.get_objects() if type(value) is torch.Tensor and value.shape[-1:] == (size,)]
        storages = {value.data_ptr(): value.untyped_storage().nbytes() for value in tensors}
        held.append(sum(storages.values()) / documents.values.untyped_storage().nbytes())
        return maxsim(queries, documents, *args, **kwargs)

    monkeypatch.setattr(pylate_losses, "maxsim", bytes_held)
    batch = batch_of(model, columns=2, queries=8)
    pylate_fastmaxsim.enable()
    loss_function = losses.CachedContrastive(model, mini_batch_size=2, score_mini_batch_size=2)
    gc.freeze()  # what is there already, weights too, is not among the objects then
    try:
        loss_function(batch)
    finally:
        gc.unfreeze()
    assert len(held) == 4
    assert 1 < held[0] < 2 and max(held) < 3, held


@pytest.mark.parametrize("query_expansion, size", [(True, 1), (False, 3)])
def test_an_encoder_that_looks_at_padding_in_calls_of_several_texts_only(encoder, caplog, query_expansion, size):
    model = load_model(encoder("lfm2"), do_query_expansion=query_expansion).double()
    loss_function = losses.CachedContrastive(model, mini_batch_size=size)
    assert_as_stock(loss_function, batch_of(model, queries=4))
    said = "Queries are divided into calls as stock PyLate does: Lfm2Model gives other token embeddings"
    assert (said in caplog.text) == query_expansion


def test_a_loss_may_be_scaled_by_what_bfloat16_cannot_say(model):
    # As of steps of accumulation: the factor is applied in float32 and not rounded first, here to 1, 0.3% less.
    loss_function, batch = losses.CachedContrastive(model, mini_batch_size=4), batch_of(model)
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
