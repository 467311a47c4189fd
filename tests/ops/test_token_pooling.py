"""Pooled tokens are those of the definition, in every layout and dtype, and so are their gradients."""

import pytest
import torch
from torch.nn.functional import normalize as unit

from pylate_fastmaxsim import TokenBatch, pool_tokens, reference
from tests.support.ragged_batches import ragged

LENGTHS = [7, 0, 20, 1, 33, 2, 3, 70]
OPTIONS = {
    "factor 2": {"factor": 2},
    "one token protected, means of length 1": {"factor": 3, "protected": 1, "normalize": True},
    "a factor that is no integer": {"factor": 1.5, "protected": 2},
    "factor 1": {"factor": 1, "normalize": True},
    "four clusters": {"count": 4, "protected": 1},
    "one cluster": {"factor": 1000},
}


def documents(dtype=torch.float32, masked=True, integers=False, seed=0) -> TokenBatch:
    """Vectors of length 1; with ``integers`` all inner products are multiples of 1/4, so that ties abound."""
    batch = ragged(torch.Generator().manual_seed(seed), LENGTHS, 8, torch.float32, integers, masked)
    if not integers:
        return batch.with_values(unit(batch.values, dim=-1).to(dtype))
    return batch.with_values((batch.values.sign() / 2).where(torch.arange(8) % 2 == 0, 0).to(dtype))


def rows_of(batch: TokenBatch) -> list[torch.Tensor]:
    assert batch.keep is None and batch.lengths.max() <= batch.max_length
    spans = zip(batch.starts.tolist(), batch.lengths.tolist(), strict=True)
    return [batch.values[start : start + length] for start, length in spans]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("integers", [False, True], ids=["random", "ties"])
def test_vectors_and_gradients_are_those_of_the_definition(options, dtype, integers):
    batch = documents(dtype, integers=integers)
    batch = batch.with_values(batch.values.requires_grad_())
    leaf = batch.values.detach().double().requires_grad_()
    expected = torch.cat(reference.pool_tokens(batch.with_values(leaf), **options))
    pooled = pool_tokens(batch, **options)
    got = torch.cat(rows_of(pooled))
    precision = {} if dtype != torch.bfloat16 else {"rtol": 2**-7, "atol": 2**-7}
    precision = precision or {"rtol": 1e-6, "atol": 1e-6}
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), expected, **precision)
    grad = torch.randn(expected.shape, dtype=torch.float64).to(dtype)
    (of_batch,) = torch.autograd.grad(got, batch.values, grad)
    (of_leaf,) = torch.autograd.grad(expected, leaf, grad.double())
    torch.testing.assert_close(of_batch.double(), of_leaf.nan_to_num(), **precision)


def test_room_to_spare_is_zero_and_layouts_agree():
    batch = documents(masked=False)
    pooled = pool_tokens(batch, 2, protected=1)
    assert pooled.lengths.tolist() == [4, 0, 10, 1, 17, 2, 2, 35] and not pooled.values[71:].any()
    padded, mask = batch.to_padded()
    for same in (pool_tokens(padded, 2, protected=1, mask=mask), pool_tokens(rows_of(batch), 2, protected=1)):
        assert all(map(torch.equal, rows_of(same), rows_of(pooled)))


def test_equal_tokens_may_leave_fewer_clusters_and_a_token_of_nan_is_far_from_all():
    tokens = torch.eye(4)[[0, 1, 0, 2, 3, 1, 2, 0]]
    assert pool_tokens([tokens, tokens[:3]], count=6).lengths.tolist() == [4, 3]
    tokens[1, 1] = torch.nan
    assert pool_tokens([tokens[:3]], count=2).values[:2].isnan().any(dim=1).tolist() == [False, True]


def test_one_graph_and_registered_as_torch_asks():
    batch = documents(masked=False)
    leaf = batch.values.nan_to_num().requires_grad_()

    def call(values):
        pooled = pool_tokens(batch.with_values(values), 2, protected=1, normalize=True)
        return pooled.values, pooled.starts, pooled.lengths

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    assert all(map(torch.equal, compiled(leaf), call(leaf)))
    grads = [torch.autograd.grad(each(leaf)[0].square().sum() * leaf.sum(), leaf)[0] for each in (compiled, call)]
    torch.testing.assert_close(*grads)
    registered = torch.ops.pylate_fastmaxsim
    arguments = leaf.detach(), batch.starts, batch.lengths, None, batch.max_length, 2.0, 0, 1
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(registered.token_clusters, arguments, test_utils=tests)
    rows, *_ = registered.token_clusters(*arguments)
    torch.library.opcheck(registered.cluster_means, (leaf, rows, 80))
    torch._dynamo.reset()
