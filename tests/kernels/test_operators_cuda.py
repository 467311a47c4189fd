"""Operators by their kernels on a GPU, of sizes and dimensions that fill it, against their definitions in float64."""

import pytest
import torch
from torch.nn import functional as F

from tests.kernels.test_operators import PLACES, check_rounded, choose, constant
from tests.support.operator_checks import check, check_exactly, check_rows_without_a_gradient
from tests.support.operators import FORMATS, OPERATORS, lengths, problem
from tools import fuzz_operators

pytest.importorskip("triton")

from pylate_fastmaxsim.kernels.compressed import launch as compressed  # noqa: E402
from pylate_fastmaxsim.kernels.winner_backward import launch as winner_backward  # noqa: E402
from pylate_fastmaxsim.kernels.xtr import launch as xtr  # noqa: E402

pytestmark = pytest.mark.cuda
CUDA = "cuda"
DTYPES = torch.bfloat16, torch.float16, torch.float32
LARGE = {"queries": lengths(0, 19, 32), "documents": lengths(1, 37, 300), "device": CUDA}
SCORES = ("maxsim", "top 4", "top 16", "softmax 0.2", "log-sum-exp", "xtr 100", "int8", "fp8", "residual")


@pytest.mark.parametrize(
    "layout, dim", [*(("all", dim) for dim in (7, 96, 128, 200, 768)), *(("shared", dim) for dim in (48, 128, 256))]
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SCORES)
def test_dimensions(name, dtype, layout, dim):
    dim = -(-dim // 8) * 8 if name == "residual" else dim
    check(name, problem(name, dim=dim, dtype=dtype, layout=layout, slots=11, **LARGE))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("queries", [(1, 32), (3, 32), (70, 32), (9, 130)], ids=str)
@pytest.mark.parametrize("format", FORMATS)
def test_numbers_of_query_rows(format, queries, dtype):
    """Each has other tiles; residual codes are decompressed in the kernel or before it."""
    name = format.split()[0].replace("plaid", "residual")
    sizes = {"queries": lengths(0, *queries), "documents": lengths(1, 333, 180), "dim": 128, "device": CUDA}
    check(name, problem(name, dtype=dtype, format=format, masked=False, **sizes))


@pytest.mark.parametrize("layout", ["all", "shared"])
def test_e4m3_without_hardware(layout, monkeypatch):
    monkeypatch.setattr(compressed, "has_fp8", lambda device: False)
    check("fp8", problem("fp8", dim=128, layout=layout, **LARGE))


@pytest.mark.parametrize("dim", [1, 32, 100, 384, 768, 1500])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["splade", "splade, two logs", "splade, relu", "splade, maxima"])
def test_dimensions_of_splade(name, dtype, dim):
    sizes = {"documents": lengths(dim, 40, 300), "rows": 1001, "device": CUDA}
    check(name, problem(name, dim=dim, dtype=dtype, masked=dim < 384, gapless=dim == 1500, **sizes))


@pytest.mark.parametrize(
    "hidden, dim", [(64, 32), (768, 128), (384, 48), (1024, 256), (4096, 1024), (100, 33), (768, 300)]
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["project", "project, any length"])
def test_dimensions_of_projections(name, dtype, hidden, dim):
    for count in (0, 1, 63, 65, 1000):
        check(
            name,
            problem(
                name, documents=(count,), gapless=True, masked=False, hidden=hidden, dim=dim, dtype=dtype, device=CUDA
            ),
        )
    case = problem("project", documents=(2000,), gapless=True, masked=False, hidden=hidden, dim=dim, device=CUDA)
    check_rows_without_a_gradient(case)


@pytest.mark.parametrize("name", ["from hidden documents", "from hidden queries", "from hidden both"])
@pytest.mark.parametrize("layout", ["all", "shared"])
def test_scores_from_hidden_states(name, layout):
    check(name, problem(name, hidden=768, dim=128, layout=layout, slots=5, floor=True, **LARGE))


@pytest.mark.parametrize("precision", ["high", "medium"])
@pytest.mark.parametrize("dim", [48, 128, 768])
@pytest.mark.parametrize("name", ["maxsim", "softmax 0.2", "top 4", "xtr 256", "splade", "project"])
def test_lower_precision_of_float32(name, dim, precision):
    check(name, problem(name, dim=dim, hidden=768, rows=1000, **LARGE), precision=precision)


@pytest.mark.parametrize("name", OPERATORS)
def test_random_shapes(name, capsys):
    given = ["--operator", name, "--count", "40", "--families", "5"]
    assert fuzz_operators.main(given, CUDA) == 0, capsys.readouterr().out


@pytest.mark.parametrize("name", ["maxsim", "top 4", "top 9", "splade, maxima", "xtr 256"])
def test_ties_go_to_the_lower_positions(name):
    case = problem(name, dim=16, integers=True, dtype=torch.bfloat16, **LARGE)
    # Kernels of SPLADE round what is below 0 as well, to 21 bits.
    check_exactly(name, case, 0.0 if name == "maxsim" else 1e-6)


@pytest.mark.parametrize("name", ["maxsim", "top 2", "top 4", "top 7", "top 64"])
@pytest.mark.parametrize("layout", ["all", "shared", "own"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_of_winners(name, layout, dtype):
    sizes = LARGE | {"queries": (32, *[20] * 18), "documents": (300, *[70] * 36)}
    case = problem(name, dim=128, dtype=dtype, layout=layout, slots=1 if layout == "own" else 5, masked=False, **sizes)
    check(name, case, poisoned=True, slack=2.5)


@pytest.mark.parametrize("gapless", [False, True])
@pytest.mark.parametrize("longest", [32, 40])
@pytest.mark.parametrize("layout", ["own", "shared"])
@pytest.mark.parametrize("scanned", [0, 2**13], ids=["ordered", "scanned"])
def test_no_more_pairs_than_documents(monkeypatch, scanned, layout, longest, gapless):
    monkeypatch.setattr(winner_backward, "SCANNED_PAIRS", scanned)
    sizes = {"queries": lengths(0, 8, longest), "documents": lengths(1, 40, 300), "slots": 5, "dim": 96, "device": CUDA}
    check("maxsim", problem("maxsim", dtype=torch.bfloat16, layout=layout, masked=False, gapless=gapless, **sizes))


LONG_ROWS = {
    "documents": {"queries": lengths(0, 20, 32), "documents": (40000, 300, 9), "dim": 64},
    # With d = 1 one of two tokens wins for every query token, and its gradient sums thousands of them.
    "sums": {"queries": (300,) * 64, "documents": (50, 20), "dim": 1},
    "sums of candidates": {"queries": (300,) * 64, "documents": (50, 20), "dim": 1, "layout": "shared", "slots": 20},
    # More queries than are read at once.
    "candidates": {"queries": lengths(0, 100, 32), "documents": lengths(1, 3000, 180), "dim": 128, "layout": "own", "slots": 30},
}  # fmt: skip


@pytest.mark.parametrize("options", LONG_ROWS.values(), ids=LONG_ROWS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_long_sums_and_documents(options, dtype):
    check("maxsim", problem("maxsim", dtype=dtype, masked=False, device=CUDA, **options), may_be_unclear=True)


@pytest.mark.parametrize("constants", [*PLACES, constant(xtr, SCRATCH_BYTES=2**18)], ids=str)
def test_similarities_in_clusters(monkeypatch, constants):
    """Tokens of a document that are nearly alike: many more exceed the first bound than there are places for."""
    choose(monkeypatch, {}, constants)
    case = problem("xtr 256", queries=(32,) * 40, documents=(180,) * 128, dim=128, masked=False, gapless=True)
    centers = torch.randn(128, 1, 128).expand(-1, 180, -1) + 0.3 * torch.randn(128, 180, 128)
    values = F.normalize(centers, dim=-1).flatten(0, 1)[torch.randperm(128 * 180)]
    case = case.with_leaves({"documents": values.bfloat16(), "queries": case.queries.values.bfloat16()})
    check("xtr 256", case.to(CUDA), may_be_unclear=True)


def test_the_kth_largest_is_one_of_the_maxima_bit_by_bit():
    """Threshold and maxima come from different kernels; if one rounded otherwise, rows would have no winner."""
    for dtype in DTYPES:
        for dim in (96, 128, 768):
            sizes = {"queries": (1,) * 64, "documents": (180,) * 128, "masked": False, "device": CUDA}
            scores = OPERATORS["xtr 1, retrieved"].call(problem("xtr 1, retrieved", dim=dim, dtype=dtype, **sizes))
            assert ((scores != 0).sum(dim=1) == 1).all()


def test_small_values_of_splade_are_precise():
    """log(1 + x) of a small x, relative to itself."""
    case = problem("splade", documents=(2,), dim=64, rows=64, masked=False, bias=False)
    weight = torch.logspace(-20, 4, 64)[:, None].repeat(1, 64)
    case = case.with_leaves({"documents": torch.eye(64)[: len(case.documents.values)], "weight": weight}).to(CUDA)
    found, expected = OPERATORS["splade"].call(case)[0].double(), weight[:, 0].double().log1p()
    torch.testing.assert_close(found.cpu(), expected, rtol=2e-6, atol=0)


def test_queries_are_rounded_as_on_a_cpu():
    check_rounded(torch.randn(3000, 128, generator=torch.Generator().manual_seed(0)).bfloat16(), CUDA)
