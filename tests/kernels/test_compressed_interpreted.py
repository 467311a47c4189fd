"""The kernels of compressed documents through Triton's interpreter. Run with TRITON_INTERPRET=1."""

import pytest
import torch

pytest.importorskip("triton")

from pylate_fastmaxsim._operands import CompressedOperands
from pylate_fastmaxsim.compressed import rounded_queries
from pylate_fastmaxsim.kernels.compressed import launch
from pylate_fastmaxsim.kernels.maxsim import tiles as forward_tiles
from pylate_fastmaxsim.kernels.maxsim.tiles import ForwardTiles
from pylate_fastmaxsim.ops.compressed import _prepared
from tests.support.chosen_tiles import choose_tiles
from tests.support.compressed_exactness import FORMATS, check, compressed_as
from tests.support.interpreter import interpreted, spread_out  # noqa: F401
from tests.support.ragged_batches import CANDIDATES, batches

pytestmark = [pytest.mark.interpret, pytest.mark.usefixtures("interpreted")]

SMALL = ForwardTiles(16, 32, 64, 3, 4, 1)


@pytest.fixture(autouse=True)
def _several_documents_a_program(monkeypatch):
    monkeypatch.setattr(forward_tiles, "_ENOUGH_ROWS", 0)


def problem(dim=24, dtype=torch.float16, documents=(7, 0, 40, 3, 33, 1), masked=True):
    queries, documents = batches(dtype, dim, (5, 17, 3, 0, 5), documents, masked)
    return queries, documents.with_values(documents.values.float())


@pytest.mark.parametrize("candidates", [None, CANDIDATES], ids=["all", "candidates"])
@pytest.mark.parametrize("format", FORMATS)
def test_formats(format, candidates, monkeypatch):
    choose_tiles(monkeypatch, launch, forward=SMALL)
    queries, documents = problem()
    check(queries, compressed_as(documents, format), candidates)


@pytest.mark.parametrize(
    "format, dim", [("int8", 1), ("int8", 136), ("int8 by token", 72), ("fp8", 136), ("residual 4", 72)]
)
def test_dimensions(format, dim, monkeypatch):
    """Beyond a chunk of d too, which has other loops."""
    if format != "residual 4":
        choose_tiles(monkeypatch, launch, forward=SMALL)
    queries, documents = problem(dim, masked=False)
    check(queries, compressed_as(documents, format))


@pytest.mark.parametrize("candidates", [None, CANDIDATES], ids=["all", "candidates"])
@pytest.mark.parametrize("format", ["residual 2", "plaid", "fp8"])
def test_documents_that_are_decompressed_first(format, candidates, monkeypatch):
    """Residual codes for many queries or for float32, and e4m3 on a GPU without it; several blocks of documents."""
    monkeypatch.setattr(launch, "_TOKENS_AT_ONCE", 100)
    monkeypatch.setattr(launch, "has_fp8", lambda device: False)
    queries, documents = problem(dtype=torch.float32)
    check(queries, compressed_as(documents, format), candidates)


def test_many_rows_decompress_first(monkeypatch):
    monkeypatch.setattr(launch, "_FUSED_ROWS", 0)
    queries, documents = problem()
    documents = compressed_as(documents, "residual 4")
    first = check(queries, documents)
    monkeypatch.setattr(launch, "_FUSED_ROWS", 1 << 20)
    torch.testing.assert_close(check(queries, documents), first, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("format", ["int8", "fp8"])
def test_queries_are_rounded_as_on_a_cpu(format, dtype):
    values = torch.randn(40, 70, generator=torch.Generator().manual_seed(0)).mul(torch.logspace(-9, 9, 40)[:, None])
    values[3] = 0
    values[5, 6], values[7, 8] = torch.nan, torch.inf
    values = values.to(dtype)
    rounded, scales = rounded_queries(values, format)
    actual, actual_scales = launch.round_rows(values, rounded.dtype)
    torch.testing.assert_close(actual_scales, scales, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(actual.float(), rounded.float())


def test_equal_maxima_go_to_the_first_token(monkeypatch):
    """Whole numbers, so that similarities are exact, in documents of more tokens than a tile."""
    choose_tiles(monkeypatch, launch, forward=SMALL)
    generator = torch.Generator().manual_seed(0)
    queries, documents = problem(8, torch.float32, (70, 1, 40, 33, 9, 64), masked=False)
    for batch in (queries, documents):
        batch.values.copy_(torch.randint(-1, 2, batch.values.shape, generator=generator))
        batch.values[:, 0] = 127
    _, winners = check(queries, compressed_as(documents, "int8"))
    for slot, (start, length) in enumerate(zip(documents.starts.tolist(), documents.lengths.tolist(), strict=True)):
        for first, count in zip(queries.starts.tolist(), queries.lengths.tolist(), strict=True):
            similarities = queries.values[first : first + count] @ documents.values[start : start + length].T
            best = (similarities == similarities.amax(dim=1, keepdim=True)).int().argmax(dim=1)
            assert torch.equal(winners[slot, first : first + count].long(), best)


def test_strided_tensors(monkeypatch):
    choose_tiles(monkeypatch, launch, forward=SMALL)
    queries, documents = problem()
    for format in ("int8", "residual 2"):
        operands = _prepared(queries, compressed_as(documents, format), CANDIDATES)
        strided = CompressedOperands(
            *(
                spread_out(x) if isinstance(x, torch.Tensor) and x.dtype != torch.int8 and x.dtype != torch.uint8 else x
                for x in operands
            )
        )
        scores, winners = launch.forward(operands, True, "highest")
        own, _ = launch.forward(strided, True, "highest")
        assert torch.equal(own, scores)
        grad = torch.ones(1, 1).expand(scores.shape)
        assert torch.equal(
            launch.backward(grad, winners, strided), launch.backward(grad.contiguous(), winners, operands)
        )
