"""GradCache in two passes: the second as the first, and what either holds on the way."""

from __future__ import annotations

import gc

import pytest
import torch
from pylate import losses
from torch.nn import functional as F

import pylate_fastmaxsim
from pylate_fastmaxsim import PooledScores, TokenBatch, _winners
from pylate_fastmaxsim.integrations.pylate import losses as pylate_losses
from tests.support.compared import assert_equal, batch_of, run
from tests.support.models import features, load_model, looking, sentences


def test_gradcache_reproduces_the_first_pass_with_dropout(encoder, mode):
    model = load_model(encoder("modernbert", mlp_dropout=0.2)).double()
    whole, cached = losses.Contrastive(model, size_average=False), losses.CachedContrastive(model, mini_batch_size=3)
    batch = batch_of(model)
    pylate_fastmaxsim.enable()
    cached(batch)  # decides how to encode, which takes calls of its own
    seen = []
    model.register_forward_hook(
        looking(lambda _module, _args, output: seen.append(output["token_embeddings"].detach()))
    )
    torch.manual_seed(1)
    loss = cached([dict(column) for column in batch])
    after_first_pass = torch.get_rng_state()
    calls = len(seen)
    loss.backward()
    assert len(seen) == 2 * calls and calls > 3
    assert all(torch.equal(first, second) for first, second in zip(seen[:calls], seen[calls:], strict=True))
    assert torch.equal(after_first_pass, torch.get_rng_state())
    with torch.no_grad():
        assert whole(batch) != whole(batch)


def test_gradcache_never_holds_more_tokens_than_its_mini_batch(model, mode):
    loss_function = losses.CachedContrastive(model, mini_batch_size=2)
    batch = batch_of(model, queries=16)
    pylate_fastmaxsim.enable()
    run(loss_function, batch)
    shapes = []
    model[0].register_forward_pre_hook(looking(lambda _module, args: shapes.append(args[0]["input_ids"].shape)))
    run(loss_function, batch)
    assert max(shape.numel() for shape in shapes) <= 2 * 32
    assert len(shapes) < 2 * (3 * 8)
    # Two documents of 32 tokens are as much as five queries of 12, so that 16 take four calls, in each of two passes.
    if mode == "grouped":
        assert [shape[0] for shape in shapes if shape[1] == 12] == 2 * [4, 4, 4, 4]


def test_gradcache_encodes_again_in_the_precision_of_the_first_pass(encoder):
    model = load_model(encoder("modernbert"))
    loss_function, batch, seen = losses.CachedContrastive(model), batch_of(model), []
    pylate_fastmaxsim.enable()
    with torch.autocast("cpu", torch.bfloat16):
        loss_function(batch)  # the trial on the first batch has calls in float32
        model[-1].linear.register_forward_hook(looking(lambda _module, _args, output: seen.append(output.dtype)))
        loss = loss_function(batch)
    loss.backward()
    assert set(seen) == {torch.bfloat16}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 5e-3), (torch.float16, 5e-4)], ids=str)
def test_gradients_of_many_chunks_are_summed_in_float32(monkeypatch, dtype, tolerance, device):
    # Of a model that leaves embeddings in 16 bits; each chunk is one query.
    torch.manual_seed(0)
    queries = F.normalize(torch.randn(256, 4, 16), dim=-1).to(device, dtype)
    documents = F.normalize(torch.randn(8, 3, 16), dim=-1).to(device, dtype)
    loss_function = losses.CachedContrastive(torch.nn.Identity(), score_mini_batch_size=1)
    monkeypatch.setattr(pylate_losses, "queries_at_once", lambda *_: 1)

    def gradient(dtype):
        batch = TokenBatch.from_padded(documents.to(dtype))
        batch.values.requires_grad_()
        scored = pylate_losses._Scored(batch, None, None, PooledScores())
        chunks = pylate_losses._losses_of_chunks(
            loss_function, queries.to(dtype).requires_grad_(), None, scored, torch.arange(256, device=device) % 8
        )
        assert len(chunks) == 256 and batch.values.grad.dtype == dtype
        return batch.values.grad.float()

    exact = gradient(torch.float32)
    assert (gradient(dtype) - exact).norm() < tolerance * exact.norm()


def test_gradcache_holds_embeddings_and_their_gradient_once(model, packed, monkeypatch):
    # As large as all documents, so that of large batches nothing else counts.
    monkeypatch.setattr(_winners, "_AT_ONCE_BYTES", 0)
    size = model(features(model, sentences(1))[0])["token_embeddings"].shape[-1]
    held = []

    def bytes_held(queries, queries_mask, scored, *rest):
        tensors = [value for value in gc.get_objects() if type(value) is torch.Tensor and value.shape[-1:] == (size,)]
        storages = {value.data_ptr(): value.untyped_storage().nbytes() for value in tensors}
        held.append(sum(storages.values()) / scored.documents.values.untyped_storage().nbytes())
        return score(queries, queries_mask, scored, *rest)

    score = pylate_losses._score
    monkeypatch.setattr(pylate_losses, "_score", bytes_held)
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


@pytest.mark.parametrize("query_expansion, mini_batch_size", [(True, 1), (False, 3)])
def test_an_encoder_that_looks_at_padding_in_calls_of_several_texts_only(
    encoder, caplog, query_expansion, mini_batch_size
):
    model = load_model(encoder("lfm2"), do_query_expansion=query_expansion).double()
    loss_function = losses.CachedContrastive(model, mini_batch_size=mini_batch_size)
    batch = batch_of(model, queries=4)
    expected = run(loss_function, batch)
    pylate_fastmaxsim.enable(stock_masking=True)
    assert_equal(run(loss_function, batch), expected)
    said = "Queries are divided into calls as stock PyLate does: Lfm2Model gives other token embeddings"
    assert (said in caplog.text) == query_expansion
