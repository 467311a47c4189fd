import pytest
import torch

from pylate_fastmaxsim import TokenBatch


def rows(batch: TokenBatch) -> list[list[list[float]]]:
    """The live token vectors of every sequence, read straight off the definition."""
    keep = torch.ones(len(batch.values), dtype=torch.bool) if batch.keep is None else batch.keep
    return [
        [batch.values[row].tolist() for row in range(start, start + length) if keep[row]]
        for start, length in zip(batch.starts.tolist(), batch.lengths.tolist(), strict=True)
    ]


def test_from_padded_shares_memory_and_keeps_all_without_a_mask():
    values = torch.randn(3, 4, 2)
    batch = TokenBatch.from_padded(values)
    assert batch.values.data_ptr() == values.data_ptr()
    assert rows(batch) == values.tolist()
    assert (len(batch), batch.dim, batch.max_length, batch.device) == (3, 2, 4, values.device)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32, torch.bfloat16])
def test_from_padded_takes_any_mask_and_ends_at_the_last_live_token(dtype):
    values = torch.randn(3, 4, 2)
    mask = torch.tensor([[0, 1, 0, 1], [1, 0, 0, 0], [0, 0, 0, 0]])
    batch = TokenBatch.from_padded(values, mask.to(dtype))
    assert batch.values.data_ptr() == values.data_ptr()
    assert batch.lengths.tolist() == [4, 1, 0]
    assert rows(batch) == [values[0, [1, 3]].tolist(), values[1, :1].tolist(), []]


def test_from_packed_shares_memory_and_finds_the_longest():
    values = torch.randn(6, 2)
    batch = TokenBatch.from_packed(values, torch.tensor([0, 1, 1, 6], dtype=torch.int32))
    assert batch.values.data_ptr() == values.data_ptr()
    assert batch.starts.dtype == batch.lengths.dtype == torch.int64
    assert (batch.lengths.tolist(), batch.max_length) == ([1, 0, 5], 5)
    assert rows(batch) == [values[:1].tolist(), [], values[1:].tolist()]
    assert TokenBatch.from_packed(values, torch.tensor([0, 6]), max_length=32).max_length == 32
    keep = torch.tensor([True, False, True, True, False, True])
    assert rows(TokenBatch.from_packed(values, torch.tensor([0, 6]), keep)) == [values[keep].tolist()]


def test_from_list_packs_in_order():
    sequences = [torch.randn(2, 3), torch.randn(0, 3), torch.randn(4, 3)]
    batch = TokenBatch.from_list(sequences)
    assert rows(batch) == [sequence.tolist() for sequence in sequences]
    assert batch.max_length == 4


def test_select_repeats_and_reorders_without_touching_the_tokens():
    batch = TokenBatch.from_list([torch.randn(1, 2), torch.randn(3, 2), torch.randn(2, 2)])
    selected = batch.select(torch.tensor([2, 0, 2]))
    assert selected.values is batch.values
    assert rows(selected) == [rows(batch)[i] for i in (2, 0, 2)]


def test_with_values_keeps_the_sequences():
    batch = TokenBatch.from_padded(torch.randn(2, 3, 4), torch.tensor([[1, 0, 1], [1, 1, 0]]))
    other = batch.with_values(torch.randn(6, 7))
    assert other.dim == 7
    assert other.starts is batch.starts and other.keep is batch.keep


def test_to_padded_inverts_from_padded_and_passes_gradients():
    values = torch.randn(3, 4, 2, requires_grad=True)
    mask = torch.tensor([[0, 1, 0, 1], [1, 0, 0, 0], [0, 0, 0, 0]], dtype=torch.bool)
    padded, padded_mask = TokenBatch.from_padded(values, mask).to_padded()
    assert torch.equal(padded_mask, mask)
    assert torch.equal(padded, values * mask[..., None])
    padded.sum().backward()
    assert torch.equal(values.grad, mask[..., None].expand_as(values).float())


def test_empty_batches():
    assert TokenBatch.from_padded(torch.randn(0, 4, 2)).to_padded()[0].shape == (0, 4, 2)
    assert TokenBatch.from_padded(torch.randn(2, 0, 3), torch.ones(2, 0)).lengths.tolist() == [0, 0]
    packed = TokenBatch.from_packed(torch.randn(0, 3), torch.tensor([0]))
    assert (len(packed), packed.max_length) == (0, 0)
    values, mask = TokenBatch.from_packed(torch.randn(0, 3), torch.tensor([0, 0, 0]), max_length=5).to_padded()
    assert values.shape == (2, 5, 3) and not mask.any()


def packed(*cu_seqlens: int, max_length: int | None = None) -> TokenBatch:
    return TokenBatch.from_packed(torch.randn(2, 3), torch.tensor(cu_seqlens), max_length=max_length)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TokenBatch.from_padded(torch.randn(2, 3)), r"values must be \[N, L, d\]"),
        (lambda: TokenBatch.from_padded(torch.randn(2, 3, 4), torch.ones(3, 2)), r"mask must be \[N, L\] = \[2, 3\]"),
        (lambda: TokenBatch.from_packed(torch.randn(2, 3), torch.ones(1, 2)), r"cu_seqlens must be \[N \+ 1\]"),
        (lambda: packed(1, 2), "must go from 0 to at most T = 2 in steps from 0, got 1 to 2 in steps from 1 to 1."),
        (lambda: packed(0, 3), "must go from 0 to at most T = 2 in steps from 0, got 0 to 3 in steps from 3 to 3."),
        (lambda: packed(0, 2, 1), "in steps from 0, got 0 to 1 in steps from -1 to 2."),
        (lambda: packed(0, 2, max_length=1), "in steps from 0 to max_length = 1, got 0 to 2 in steps from 2 to 2."),
        (lambda: TokenBatch.from_list([]), "empty list"),
        (lambda: TokenBatch(torch.randn(2), torch.zeros(1), torch.zeros(1), 1), r"values must be \[T, d\]"),
        (lambda: TokenBatch(torch.randn(2, 3), torch.zeros(1), torch.zeros(2), 1), r"must both be \[N\]"),
        (
            lambda: TokenBatch(torch.randn(2, 3), torch.zeros(1), torch.zeros(1), 1, torch.ones(3, dtype=torch.bool)),
            r"keep must be \[T\] = \[2\]",
        ),
    ],
)
def test_errors_say_what_is_allowed(make, message):
    with pytest.raises(ValueError, match=message):
        make()
