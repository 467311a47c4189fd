"""Models of Sentence Transformers on a GPU: with its own attention, kernels and compiler."""

import pytest
import torch
from accelerate.utils import send_to_device

from pylate_fastmaxsim import pool_tokens
from tests.support.compared import distance
from tests.support.hosts import each_host
from tests.support.models import sentences

pytestmark = pytest.mark.cuda


def on_gpu(step):
    batch = send_to_device(step.batch, "cuda")
    return step._replace(batch=batch, labels=None if step.labels is None else step.labels.to("cuda"))


STEPS = [
    *(("MultiVectorEncoder", "modernbert", *each) for each in ((False, "cached"), (True, "contrastive"))),
    *(("MultiVectorEncoder", *each) for each in (("bert", True, "cached"), ("qwen3", False, "contrastive"))),
    *(("SparseEncoder", family, True, "contrastive") for family in ("bert", "modernbert")),
    *(("SparseEncoder", family, False, "contrastive") for family in ("distilbert", "xlm-roberta")),
]


CASES = [param for name, *each in STEPS for param in each_host([name], *each)]


@pytest.mark.parametrize("host, family, compiled, loss", CASES)
def test_packed_in_bf16(encoder, monkeypatch, host, family, compiled, loss):
    torch.manual_seed(0)
    model = host.model(encoder, family).float().to("cuda")
    step = on_gpu(host.losses[loss](model))
    exact, stock = step.run(), step.run(bf16=True)
    seen = host.watch(model, monkeypatch)
    host.enable(compile=compiled)
    for _ in range(2):
        seen.clear()
        ours = step.run(bf16=True)
    assert host.modes(model) == {"packed"} and bool(seen) != host.watches_stock
    assert ours[0].dtype == stock[0].dtype
    assert ours[0].item() == pytest.approx(exact[0].item(), rel=3e-2)
    # A winner that bf16 picks otherwise moves the few gradients here by a fifth, in stock too.
    assert distance(ours, exact) < max(0.4, 2 * distance(stock, exact))


@pytest.mark.parametrize("host", each_host(["SparseEncoder"]))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_texts_that_a_sparse_encoder_encodes(encoder, host, dtype):
    from tests.support.splade_steps import TEXTS

    model = host.model(encoder).to("cuda", dtype)
    stock = model.encode(TEXTS[3], show_progress_bar=False)
    host.enable()
    ours = model.encode(TEXTS[3], show_progress_bar=False)
    assert (ours.layout, ours.dtype, ours.device) == (stock.layout, stock.dtype, stock.device)
    tolerance = 1e-4 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(ours.to_dense(), stock.to_dense(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("host", each_host(["PyLate"]))
def test_documents_are_pooled_before_they_are_copied(encoder, host):
    model = host.model(encoder).float().to("cuda")
    host.enable()
    whole, pooled = (
        model.encode(sentences(300, 20, seed=3), is_query=False, show_progress_bar=False, pool_factor=factor)
        for factor in (1, 2)
    )
    expected = pool_tokens([torch.from_numpy(each).to("cuda") for each in whole], 2, protected=1)
    assert list(map(len, pooled)) == expected.lengths.tolist()
    for own, start in zip(pooled, expected.starts.tolist(), strict=True):
        torch.testing.assert_close(torch.from_numpy(own), expected.values[start : start + len(own)].cpu())
