import numpy as np
import pytest
import torch

from pylate_fastmaxsim import TokenBatch, compress, maxsim
from pylate_fastmaxsim.retrieval.corpus import write_corpus
from pylate_fastmaxsim.retrieval.search import search


def rows(batch: TokenBatch) -> list[list[list[float]]]:
    """The live token vectors of every sequence, read straight off the definition."""
    keep = torch.ones(len(batch.values), dtype=torch.bool) if batch.keep is None else batch.keep
    return [
        [batch.values[row].tolist() for row in range(start, start + length) if keep[row]]
        for start, length in zip(batch.starts.tolist(), batch.lengths.tolist(), strict=True)
    ]


MASK = torch.tensor([[0, 1, 0, 1], [1, 0, 0, 0], [0, 0, 0, 0]])


def test_from_padded_shares_memory_and_keeps_all_without_a_mask():
    values = torch.randn(3, 4, 2)
    batch = TokenBatch.from_padded(values)
    assert batch.values.data_ptr() == values.data_ptr() and rows(batch) == values.tolist()
    assert (len(batch), batch.dim, batch.max_length, batch.device) == (3, 2, 4, values.device)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.bfloat16])
def test_from_padded_takes_any_mask_and_ends_at_the_last_live_token(dtype):
    values = torch.randn(3, 4, 2)
    batch = TokenBatch.from_padded(values, MASK.to(dtype))
    assert batch.values.data_ptr() == values.data_ptr() and batch.lengths.tolist() == [4, 1, 0]
    assert rows(batch) == [values[0, [1, 3]].tolist(), values[1, :1].tolist(), []]


def test_from_packed_shares_memory_and_finds_the_longest():
    values = torch.randn(6, 2)
    batch = TokenBatch.from_packed(values, torch.tensor([0, 1, 1, 6], dtype=torch.int32))
    assert batch.values.data_ptr() == values.data_ptr()
    assert batch.starts.dtype == batch.lengths.dtype == torch.int64
    assert (batch.lengths.tolist(), batch.max_length) == ([1, 0, 5], 5)
    assert rows(batch) == [values[:1].tolist(), [], values[1:].tolist()]
    for longest in (32, np.int64(32), np.int32(32), torch.tensor(32)):
        found = TokenBatch.from_packed(values, torch.tensor([0, 6]), max_length=longest).max_length
        assert type(found) is int and found == 32
    keep = torch.tensor([True, False, True, True, False, True])
    assert rows(TokenBatch.from_packed(values, torch.tensor([0, 6]), keep)) == [values[keep].tolist()]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_from_packed_keeps_bounds_that_their_owner_fills_again(dtype):
    bounds = torch.tensor([0, 4, 6], dtype=dtype)
    batch = TokenBatch.from_packed(torch.randn(6, 2), bounds)
    bounds.copy_(torch.tensor([0, 2, 6]))
    assert (batch.starts.tolist(), batch.lengths.tolist()) == ([0, 4], [4, 2])


def test_a_graph_needs_the_longest_sequence():
    def scores(values, bounds, **options):
        return maxsim(torch.ones(1, 2, 3), TokenBatch.from_packed(values, bounds, **options))

    inputs = torch.randn(5, 3), torch.tensor([0, 2, 5])
    whole = torch.compile(scores, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="max_length must be passed where the call is compiled with fullgraph=True or"):
        whole(*inputs)
    in_parts = torch.compile(scores, backend="eager")
    for actual in (whole(*inputs, max_length=3), in_parts(*inputs)):
        torch.testing.assert_close(actual, scores(*inputs))


@pytest.mark.parametrize(
    "form",
    [
        lambda texts: texts,
        lambda texts: [text.detach().numpy() for text in texts],
        lambda texts: torch.stack([texts[0]] * 3),
        lambda texts: torch.stack([texts[0]] * 3).detach().numpy(),
    ],
    ids=["list", "arrays", "padded", "padded array"],
)
def test_operators_take_what_models_return(form, tmp_path):
    texts = [torch.randn(length, 4, requires_grad=True) for length in (3, 1, 5)]
    made = form(texts)
    batch = TokenBatch.from_padded(torch.as_tensor(made)) if hasattr(made, "ndim") else TokenBatch.from_list(made)
    scores = maxsim(batch, batch)
    assert torch.equal(maxsim(made, made), scores)
    if scores.requires_grad:
        maxsim(made, made).sum().backward()
        assert texts[0].grad.abs().sum() > 0
    with torch.no_grad():
        assert torch.equal(maxsim(made, compress(made, "int8")), maxsim(batch, compress(batch, "int8")))
    corpus = write_corpus(tmp_path / "corpus", made, torch.float32)
    for documents in (made, batch, [made], iter([batch]), corpus):
        assert torch.equal(search(made, documents, k=2).scores, scores.topk(2).values)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_from_list_keeps_dtypes_under_autocast(dtype):
    leaves = [torch.ones(n, 3, dtype=dtype, requires_grad=True) for n in (2, 4)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        batch = TokenBatch.from_list(leaves)
    batch.values.sum().backward()
    assert batch.values.dtype == dtype and all(leaf.grad is not None for leaf in leaves)


def test_select_repeats_and_reorders_without_touching_the_tokens():
    sequences = [torch.randn(2, 3), torch.randn(0, 3), torch.randn(4, 3)]
    batch = TokenBatch.from_list(sequences)
    assert rows(batch) == [sequence.tolist() for sequence in sequences] and batch.max_length == 4
    selected = batch.select(torch.tensor([2, 0, 2]))
    assert selected.values is batch.values and rows(selected) == [rows(batch)[i] for i in (2, 0, 2)]
    assert batch.with_values(batch.values[:, :1]).starts is batch.starts


def test_to_padded_inverts_from_padded_and_passes_gradients():
    values = torch.randn(3, 4, 2, requires_grad=True)
    padded, mask = TokenBatch.from_padded(values, MASK).to_padded()
    assert torch.equal(mask, MASK.bool()) and torch.equal(padded, values * mask[..., None])
    padded.sum().backward()
    assert torch.equal(values.grad, mask[..., None].expand_as(values).float())


def test_empty_batches():
    assert TokenBatch.from_padded(torch.randn(0, 4, 2)).to_padded()[0].shape == (0, 4, 2)
    assert TokenBatch.from_padded(torch.randn(2, 0, 3), torch.ones(2, 0)).lengths.tolist() == [0, 0]
    assert TokenBatch.from_packed(torch.randn(0, 3), torch.tensor([0])).max_length == 0
    values, mask = TokenBatch.from_packed(torch.randn(0, 3), torch.tensor([0, 0, 0]), max_length=5).to_padded()
    assert values.shape == (2, 5, 3) and not mask.any()


def packed(*cu_seqlens: int, max_length: int | None = None) -> TokenBatch:
    return TokenBatch.from_packed(torch.randn(2, 3), torch.tensor(cu_seqlens), max_length=max_length)


BOUNDS, ONE = torch.tensor([0, 2]), torch.ones(1, dtype=torch.int64)


def direct(**arguments) -> TokenBatch:
    return TokenBatch(**{"values": torch.randn(2, 3), "starts": ONE, "lengths": ONE, "max_length": 2, **arguments})


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: TokenBatch.from_packed(torch.randn(2, 3), torch.tensor([0.0, 1.6, 2.0])), ValueError, r"cu_seqlens must be"),
        (lambda: TokenBatch.from_packed(torch.randn(2, 3), BOUNDS, torch.ones(3)), ValueError, r"from_packed: keep must be \[T\]"),
        (lambda: direct(values=torch.ones(2, 3).long()), ValueError, "TokenBatch: values must be floating point, got torch.int64"),
        (lambda: direct(starts=torch.zeros(1)), ValueError, r"starts must be int64 \[N\], got torch.float32"),
        (lambda: direct(starts=ONE.to("meta")), ValueError, "starts must be on cpu, as the rest, got meta"),
        (lambda: direct(lengths=3 * ONE), ValueError, "lengths must be from 0 to max_length = 2, got 3 to 3"),
        (lambda: direct(starts=(2**63 - 1) * ONE), ValueError, f"rows 0 to T = 2 of values, got {2**63 - 1} to {2**63 - 1}"),
        (lambda: direct(starts=ONE[:0], lengths=ONE[:0], gapless=True), ValueError, "every one of the T = 2 rows"),
        (lambda: direct(values=torch.ones(2, 3).to_sparse()), ValueError, r"values must be a dense tensor \[T, d\], got"),
        (lambda: direct(keep=torch.ones(2, dtype=torch.int64)), ValueError, r"keep must be bool \[T\] .* got torch.int64"),
        (lambda: TokenBatch.from_padded(torch.randn(2, 3)), ValueError, r"values must be \[N, L, d\]"),
        (lambda: TokenBatch.from_padded(torch.randn(2, 3, 4), torch.ones(3, 2)), ValueError, r"mask must be \[N, L\] = \[2, 3\]"),
        (lambda: packed(1, 2), ValueError, "must go from 0 to at most T = 2 in steps from 0, got 1 to 2 in steps from 1 to 1."),
        (lambda: packed(0, 2, max_length=1), ValueError, "in steps from 0 to max_length = 1, got 0 to 2 in steps from 2 to 2."),
        # Of an additive mask, and of weights.
        (lambda: TokenBatch.from_padded(torch.ones(1, 2, 3), torch.tensor([[0.0, -1e4]])), ValueError, "from_padded: mask must"),
        (lambda: direct().with_values(torch.randn(3, 3)), ValueError, r"with T = 2, as before, got torch.float32 of shape \(3, 3\)"),
        (lambda: TokenBatch(torch.ones(4, 4), 0 * BOUNDS, 2 + 0 * BOUNDS, 2, gapless=True), ValueError, "with gapless .* but some belong to several"),
        (lambda: TokenBatch.from_padded([[[1.0]]]), TypeError, r"from_padded: padded values must be a tensor \[N, L, d\], got list"),
        (lambda: TokenBatch.from_packed(np.ones((2, 3)), BOUNDS), TypeError, "from_packed: values .* got ndarray"),
        (lambda: TokenBatch.from_packed(torch.ones(2, 3), [0, 2]), TypeError, "from_packed: cu_seqlens must be a tensor int32 or"),
        (lambda: TokenBatch.from_list(torch.ones(2, 3, 4)), TypeError, "sequences must be a list of tensors .* got Tensor"),
        (lambda: packed(0, 2, max_length="a"), TypeError, "from_packed: max_length must be an integer, got 'a'"),
    ],
)  # fmt: skip
def test_errors_say_what_is_allowed(make, error, message):
    with pytest.raises(error, match=message):
        make()
