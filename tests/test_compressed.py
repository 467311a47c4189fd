import pickle

import pytest
import torch

from pylate_fastmaxsim import CompressedBatch, TokenBatch, compress, reference
from pylate_fastmaxsim.compressed import Int8, rounded_queries
from tests.support.operators import compressed_as
from tests.support.ragged_batches import ragged
from tests.support.residual_codecs import random_codec

FORMATS = ("int8", "int8 by token", "fp8", "residual 4")


def documents(dtype=torch.float32, masked=True, lengths=(7, 0, 20, 3, 9, 1), dim=16, seed=0) -> TokenBatch:
    """Rows that do not count are NaN."""
    return ragged(torch.Generator().manual_seed(seed), list(lengths), dim, dtype, masked=masked)


def live(batch: TokenBatch) -> torch.Tensor:
    return batch.values.isfinite().all(dim=1)


def assert_same(one: CompressedBatch, other: CompressedBatch) -> None:
    for ours, theirs in zip(one.tokens.tensors, other.tokens.tensors, strict=True):
        assert torch.equal(ours.view(torch.uint8).cpu(), theirs.view(torch.uint8).cpu())
    assert torch.equal(one.decompress().values.cpu(), other.decompress().values.cpu())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("format", FORMATS)
def test_numbers_come_back_within_half_a_step(format, dtype):
    batch = documents(dtype)
    rows, exact = live(batch), batch.values.double()
    decompressed = compressed_as(batch, format).decompress(torch.float64).values
    assert decompressed.isfinite().all()
    errors, numbers = (decompressed - exact)[rows].abs(), exact[rows].abs()
    if format == "int8 by token":
        assert (errors <= numbers.amax(dim=1, keepdim=True) / 254 * 1.0001).all()
    elif format == "int8":
        for start, length in zip(batch.starts, batch.lengths, strict=True):
            own = slice(start, start + length)
            bound = exact[own].nan_to_num().abs() / 254 * 1.0001
            assert length == 0 or ((decompressed - exact)[own].nan_to_num().abs() <= bound.max()).all()
    elif format == "fp8":  # 3 bits behind the first, and steps of 2**-9 * 2**-7 below
        assert (errors <= (numbers / 16).clamp(min=2**-17)).all()
    else:
        torch.testing.assert_close(decompressed[rows].norm(dim=1), numbers.norm(dim=1), rtol=1e-6, atol=0)


@pytest.mark.parametrize("format", FORMATS)
def test_small_chunks_and_a_pickle_give_the_same(format, monkeypatch):
    whole = compressed_as(documents(), format)
    monkeypatch.setattr("pylate_fastmaxsim.codec.AT_ONCE", 48)
    assert_same(compressed_as(documents(), format), whole)
    assert_same(pickle.loads(pickle.dumps(whole)), whole)
    queries = torch.randn(9, 16)
    for name in ("int8", "fp8"):
        pieces = [rounded_queries(part, name) for part in queries.split(1)]
        for one, other in zip(rounded_queries(queries, name), zip(*pieces, strict=True), strict=True):
            assert torch.equal(one.float(), torch.cat(other).float())


@pytest.mark.parametrize("format", FORMATS)
def test_selected_documents_are_those_documents(format):
    batch = documents()
    index = torch.tensor([3, 0, 3, 1, 5])
    whole, few = compressed_as(batch, format), compressed_as(batch, format).select(index)
    expected = whole.decompress().select(index).to_padded()
    assert all(map(torch.equal, few.decompress().to_padded(), expected))
    assert few.format == format.split()[0]
    # Also where documents share rows before they are compressed.
    again = compressed_as(batch.select(index), format)
    if format != "fp8":  # whose scale may differ
        assert torch.equal(again.decompress().to_padded()[0], expected[0])
    if format == "int8":
        assert torch.equal(again.tokens.scales, whole.tokens.scales[index])


def test_an_empty_document_takes_no_row_from_another_that_starts_there():
    starts, lengths = torch.tensor([0, 0, 3, 3]), torch.tensor([3, 0, 0, 2])
    batch = TokenBatch(torch.tensor([[8.0], [2.0], [1.0], [4.0], [3.0]]), starts, lengths, 3)
    assert (compress(batch, "int8").tokens.scales * 127).tolist() == [8, 0, 0, 4]


@pytest.mark.parametrize("format", FORMATS)
def test_documents_that_share_some_rows_are_refused(format):
    for starts, lengths in (([0, 3], [4, 4]), ([0, 1], [6, 2]), ([0, 0, 0], [0, 4, 2])):
        batch = TokenBatch(torch.ones(8, 16), torch.tensor(starts), torch.tensor(lengths), 6)
        with pytest.raises(ValueError, match="compress: documents must not share rows, unless they share all of them"):
            compressed_as(batch, format)


def test_the_scale_of_fp8_fits_the_numbers():
    def scale_of(*numbers):
        return compress(TokenBatch.from_list([torch.tensor([numbers])]), "fp8").tokens.scale

    assert scale_of(1.75, -0.1) == scale_of(2**-8, 0.0) == scale_of(0.0, 0.0) == 2**-8
    assert scale_of(1.75 * 2**-20, 0.0) == 2**-28  # 2**-8 would leave zeros
    assert scale_of(1.7500002, 0.0) == 2**-7
    assert scale_of(-448.0, 3.0) == 1
    assert scale_of(448.5, 3.0) == 2


def test_rounded_queries():
    largest = [448.0, 448.1, 224.0, 0.0, 1e-40, 3e38, torch.nan, 1.0]
    numbers = torch.tensor([[number, float(number not in (0.0, 1e-40))] for number in largest])
    numbers[7, 1] = torch.inf
    values, scales = rounded_queries(numbers, "fp8")
    assert scales[:6].tolist() == [1, 2, 0.5, 0, 2.0**-126, 2.0**120]
    assert values.float()[:3].tolist() == [[448, 1], [224, 0.5], [448, 2]]
    assert scales[6:].isnan().all() and not values.float()[6:].any()
    large = torch.randn(500, 8) * torch.exp(60 * torch.linspace(-1, 1, 500))[:, None]
    values, scales = rounded_queries(large, "fp8")
    largest = large.double().abs().amax(dim=1) / scales.double()
    assert ((largest > 224) & (largest <= 448)).all()
    assert torch.equal(torch.frexp(scales).mantissa, torch.full((500,), 0.5))
    product = values.double() * scales.double()[:, None]
    torch.testing.assert_close(product, large.double(), rtol=1 / 16, atol=2**-10 * 1e38)

    values, scales = rounded_queries(numbers, "int8")
    assert values[0].tolist() == [127, 0] and scales[0] == 448 / 127
    assert scales[3] == 0 and scales[6:].isnan().all() and not values[[3, 6, 7]].any()
    half = torch.tensor([[127.0, 0.5, 1.5, -2.5]], dtype=torch.bfloat16, requires_grad=True)
    assert rounded_queries(half, "int8")[0].tolist() == [[127, 0, 2, -2]]
    assert rounded_queries(torch.zeros(0, 4), "int8")[1].shape == (0,)


@pytest.mark.parametrize("format", FORMATS)
def test_empty_batches(format):
    for batch in (documents(lengths=()), documents(lengths=(0, 0)), TokenBatch.from_padded(torch.zeros(0, 3, 8))):
        few = compressed_as(batch, format)
        assert len(few) == len(batch) and few.decompress().to_padded()[0].shape == batch.to_padded()[0].shape


def test_plaid_codes_have_unit_vectors():
    whole, batch = (compressed_as(documents(), format) for format in ("residual 4", "plaid"))
    vectors = batch.to("cpu").select(torch.arange(6)).decompress(torch.float64).values
    expected = torch.nn.functional.normalize(whole.decompress(torch.float64).values)
    rows = expected.any(dim=1)
    torch.testing.assert_close(vectors[rows], expected[rows], rtol=0, atol=1e-6)
    torch.testing.assert_close(vectors.norm(dim=1), torch.ones(len(vectors)).double(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("format", ["int8", "int8 by token", "fp8"])
def test_similarities_differ_by_no_more_than_docs_say(format):
    one_token = ragged(torch.Generator().manual_seed(1), [1] * 40, 16, torch.float64)
    unit = one_token.with_values(torch.nn.functional.normalize(one_token.values))
    documents = compressed_as(unit, format)
    errors = (reference.compressed_maxsim(unit, documents) - reference.maxsim(unit, unit)).abs()
    numbers, decompressed = (each.values[unit.starts] for each in (unit, documents.decompress(torch.float64)))
    if format == "fp8":
        bound = 0.13 * numbers.abs() @ numbers.abs().T + 1e-4
    else:
        scale = numbers.abs().amax(dim=1) / 127
        bound = (numbers.abs().sum(1)[:, None] * scale + scale[:, None] * decompressed.abs().sum(1)) / 2 + 1e-6
    assert (errors <= bound).all() and errors.max() > bound.max() / 20


@pytest.mark.cuda
@pytest.mark.parametrize("format", FORMATS)
def test_a_gpu_makes_the_same(format):
    batch = documents()
    tensors = [each.cuda() for each in (batch.values, batch.starts, batch.lengths, batch.keep)]
    on_gpu = TokenBatch(*tensors[:3], batch.max_length, tensors[3])
    here = compressed_as(batch, format)
    if format == "residual 4":  # codes as chosen here: the nearest of two may differ by rounding
        there = here.to("cuda")
        torch.testing.assert_close(compress(on_gpu, there.tokens.codec).tokens.scales.cpu(), here.tokens.scales)
    else:
        there = compressed_as(on_gpu, format)
    assert_same(here, there.to("cuda:0"))


VALUES, SCALES = torch.zeros(3, 8, dtype=torch.int8), torch.zeros(3)
ONE = torch.ones(1, dtype=torch.int64)


def batch_of(tokens, **changes) -> CompressedBatch:
    return CompressedBatch(**{"tokens": tokens, "starts": ONE, "lengths": ONE, "max_length": 2} | changes)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: compress(torch.zeros(3, 4), "int8"),
            r"compress: batch must be \[N, L, d\], got one text of shape \(3, 4\)",
        ),
        (lambda: batch_of(VALUES), "tokens must be Int8, Fp8 or Residual, got Tensor"),
        (lambda: compress(documents(), "int4"), 'format must be "int8", "fp8" or a ResidualCodec, got \'int4\''),
        (lambda: compress(documents(), "fp8", per_token=True), 'per_token goes with the format "int8" alone'),
        (lambda: compress(documents(), random_codec(8, 4)), "compress: the codec is for d = 8, but .* have d = 16"),
        (lambda: batch_of(Int8(VALUES, SCALES, True), lengths=3 * ONE), "CompressedBatch: lengths must be from 0 to"),
        (lambda: batch_of(Int8(VALUES, SCALES, True), starts=3 * ONE), "rows 0 to T = 3 of tokens, got 3 to 4"),
        (lambda: batch_of(Int8(VALUES, SCALES, False)), r"scales must be \[N\] with N = 1, got \[3\]"),
        (lambda: batch_of(Int8(VALUES, SCALES, True), keep=torch.ones(2).bool()), r"keep must be bool \[T\] with T"),
    ],
)
def test_errors_say_what_is_allowed(make, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make()


@pytest.mark.parametrize("format", FORMATS)
def test_live_tokens_that_are_not_finite_or_want_a_gradient_are_refused(format):
    for number in (torch.nan, torch.inf, -torch.inf, 1e39):
        batch = documents(torch.float64)
        batch.values[live(batch).nonzero()[3], 5] = number
        with pytest.raises(ValueError, match="compress: token vectors must be finite in float32, got NaN or infinity"):
            compressed_as(batch, format)
    learned = documents().with_values(documents().values.requires_grad_())
    with pytest.raises(ValueError, match="compressed documents have no gradient, but these vectors want one; detach"):
        compressed_as(learned, format)
    with torch.no_grad():
        assert not any(tensor.requires_grad for tensor in compressed_as(learned, format).tokens.tensors)
