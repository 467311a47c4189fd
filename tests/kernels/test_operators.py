"""Operators by their kernels, in Triton's interpreter (TRITON_INTERPRET=1) and on a GPU, against their definitions in float64."""

from dataclasses import replace
from inspect import unwrap
from types import ModuleType

import pytest
import torch

from pylate_fastmaxsim.compressed import rounded_queries
from pylate_fastmaxsim.kernels.compressed import launch as compressed
from pylate_fastmaxsim.kernels.maxsim import launch as maxsim
from pylate_fastmaxsim.kernels.maxsim import tiles as maxsim_tiles
from pylate_fastmaxsim.kernels.maxsim.tiles import ForwardTiles
from pylate_fastmaxsim.kernels.pooled import launch as pooled
from pylate_fastmaxsim.kernels.projection import launch as projection
from pylate_fastmaxsim.kernels.projection import tiles as projection_tiles
from pylate_fastmaxsim.kernels.splade import launch as splade
from pylate_fastmaxsim.kernels.winner_backward import launch as winner_backward
from pylate_fastmaxsim.kernels.winner_backward import tiles as backward_tiles
from pylate_fastmaxsim.kernels.xtr import launch as xtr
from tests.support.interpreter import interpreted  # noqa: F401
from tests.support.operator_checks import (
    check,
    check_exactly,
    check_layouts,
    check_nan,
    check_nan_in_splade,
    check_rows_without_a_gradient,
    outcome,
    random_gradient,
)
from tests.support.operators import FORMATS, OPERATORS, compressed_as, problem

CUDA = "cuda"

# Small tiles: the interpreter pays per operation and per element, and several tiles must take part.
FORWARD = ForwardTiles(16, 32, 64, 3, 4, 1)
TILES = {
    (maxsim, "forward"): FORWARD,
    (compressed, "forward"): FORWARD,
    (winner_backward, "query_gradient"): backward_tiles.QueryGradientTiles(4, 64, 2, 1),
    (winner_backward, "document_gradient"): backward_tiles.DocumentGradientTiles(16, 16, 64, 32, 1, 4, 1),
    (winner_backward, "candidate_gradient"): backward_tiles.CandidateGradientTiles(16, 16, 64, 4, 1),
    (pooled, "forward"): FORWARD,
    (pooled, "query_gradient"): pooled.QueryGradientTiles(16, 16, 64, 64, 4, 1),
    (pooled, "document_gradient"): pooled.DocumentGradientTiles(16, 16, 64, 64, 4, 1),
    (xtr, "maxima"): ForwardTiles(16, 32, 64, 2, 4, 1),
    (xtr, "collect"): xtr.CollectTiles(16, 16, 4, 1),
    (splade, "maxima"): splade.MaximaTiles(16, 32, 16, 2, 4, 1),
    (projection, "project"): projection_tiles.ProjectionTiles(16, 32, 32, 4, 1),
    (projection, "hidden_gradient"): projection_tiles.ProjectionTiles(16, 32, 32, 4, 1),
    (projection, "weight_gradient"): projection_tiles.WeightGradientTiles(16, 32, 32, 4, 1),
}
# The k best of more than 32 columns, and a vector in several chunks.
OF_64 = {(pooled, "forward"): ForwardTiles(16, 64, 64, 3, 4, 1)}
CHUNKS = {
    (pooled, "forward"): ForwardTiles(16, 32, 16, 3, 4, 1),
    (pooled, "query_gradient"): pooled.QueryGradientTiles(16, 16, 16, 32, 4, 1),
    (pooled, "document_gradient"): pooled.DocumentGradientTiles(16, 16, 16, 32, 4, 1),
}
# So few rows would otherwise leave one document to each program, and one part to each gradient.
CONSTANTS = {
    (maxsim_tiles, "ENOUGH_ROWS"): 0,
    (pooled, "ENOUGH_PROGRAMS"): 5,
    (projection_tiles, "FEWEST_ROWS"): 16,
    (projection_tiles, "ENOUGH_PROGRAMS"): 12,
}


def choose(monkeypatch: pytest.MonkeyPatch, tiles: dict[tuple[ModuleType, str], tuple], constants: dict = {}) -> None:  # noqa: B006
    """Kernels are launched with these tiles, and with these constants of modules."""
    for (module, name), tile in tiles.items():
        if hasattr(module, "_plan"):
            monkeypatch.setattr(module, "_plan", unwrap(module._plan))  # which would keep the plan of other tiles
        monkeypatch.setattr(module, f"{name}_tiles", lambda *_, tile=tile: tile)
    for (module, name), value in constants.items():
        monkeypatch.setattr(module, name, value)


@pytest.fixture
def small(interpreted, monkeypatch):  # noqa: F811
    choose(monkeypatch, TILES, CONSTANTS)


def rows(names, options, tiles=(), constants=(), **more):
    """A row for each of the names; options, tiles and constants of modules are dicts."""
    return [(name, options | more, dict(tiles), dict(constants)) for name in names]


RAGGED = {"queries": (5, 0, 3, 1, 8, 2), "documents": (1, 40, 0, 17, 33), "slots": 3}
MIXED = {"queries": (5, 17, 3, 0, 5), "documents": (7, 0, 70, 3, 33, 1), "dim": 24}
OF_WINNERS = {"queries": (4, 20, 0, 5), "documents": (2, 40, 0, 19, 70), "masked": False}
SHORT, LONG = (4, 7, 1), (4, 20, 1)
FEW_PAIRS = {"documents": (20, 3, 35, 0, 16, 9), "dim": 48, "masked": False}
RANKS = ("maxsim", "top 2", "top 4", "top 7")


def constant(module, **values):
    return {(module, name): value for name, value in values.items()}


PLACES = [constant(xtr, PLACES_OF_K=p, PLACES=0, ROUNDS=r) for p, r in ((1, 0), (1, 1), (2, 3))]
ROWS = {
    "ragged": [
        *rows(["maxsim"], RAGGED, dim=1),
        *rows(["maxsim", "xtr 5"], RAGGED, dim=7, layout="shared", gapless=True),
        *rows(["maxsim"], RAGGED, dim=48, gapless=True, floor=True),
        *rows(["maxsim", "xtr 30"], RAGGED, dim=128, floor=True),
        *rows(["maxsim", "xtr 100, retrieved"], RAGGED, dim=200, layout="shared", floor=True),
        *rows(["xtr 1", "xtr 5000", "xtr 5, retrieved", "xtr 5000, retrieved"], RAGGED, dim=48),
    ],
    # Of short documents, whose maxima are below 0 now and then.
    "floors": [
        *rows(["maxsim", "xtr 12"], {"queries": (6, 3), "documents": (1,) * 12}, dim=2, masked=False, floor=True),
        *rows(["maxsim"], {"queries": (6, 3), "documents": (1,) * 12}, dim=2, masked=False, floor=True, layout="shared"),
    ],
    "half": [
        *rows(["maxsim", "xtr 12"], {}, dtype=torch.bfloat16, dim=48),
        *rows(["maxsim"], {}, dtype=torch.float16, dim=48, layout="shared"),
        *rows(["softmax 1.0", "top 3"], MIXED, OF_64, dtype=torch.bfloat16),
        *rows(["log-sum-exp"], MIXED, OF_64, dtype=torch.float16),
        *rows(["splade"], {}, dtype=torch.bfloat16, dim=24, masked=False, rows=33),
        *rows(["splade"], {}, dtype=torch.float16, dim=1, rows=33),
    ],
    "long queries": [
        *rows(["maxsim"], {}, queries=(37, 2, 130), documents=(18, 5), dim=80),
        *rows(["maxsim"], {}, queries=(37, 2, 130), documents=(18, 5), layout="shared", floor=True),
        *rows(["softmax 4.0", "top 3"], {}, CHUNKS, dim=40, queries=(30, 0, 5), documents=(7, 0, 20)),
    ],
    "long documents": rows(["maxsim"], {}, queries=(3, 2), documents=(256, 300)) + rows(["maxsim"], {}, queries=(3, 2), documents=(255, 2)),
    "poolings": [
        *rows(["softmax 1.0", "top 2", "top 4"], MIXED),
        *rows(["log-sum-exp", "top 4"], MIXED, layout="shared"),
        *rows(["softmax 1.0", "log-sum-exp"], MIXED, masked=False, gapless=True),
        *rows(["softmax 1.0"], MIXED, masked=False, layout="shared"),
        *rows(["top 5", "top 40"], MIXED | {"queries": (5, 0, 17), "documents": (7, 0, 130)}, OF_64),
    ],
    "parts and rounds of XTR": [
        *rows(["xtr 5"], {"documents": (1, 20, 0, 7)}, (), constant(xtr, SCRATCH_BYTES=1), dtype=torch.bfloat16, dim=8),
        *(row for places in PLACES for row in rows(["xtr 1", "xtr 12"], {"queries": (3, 2), "documents": (40, 3, 34)}, (), places, dim=8)),
        *rows(["xtr 5"], {"queries": (3,), "documents": (5,) * 6}, (), constant(xtr, ROUNDS=0), dim=8),
        # Documents of negative maxima take part, unless one of their tokens does not pass.
        *(row for floor in (False, True) for row in rows(["xtr 12", "xtr 30", "xtr 30, retrieved"], {"queries": (2, 3), "documents": (1, 2, 1, 3, 12, 2, 1)}, dim=2, masked=False, floor=floor)),
    ],
    "compressed": [
        *(row for format in FORMATS for row in rows([format.split()[0].replace("plaid", "residual")], MIXED, dtype=torch.float16, format=format)),
        *(row for format in ("int8", "fp8", "residual 2", "plaid") for row in rows([format.split()[0].replace("plaid", "residual")], MIXED, dtype=torch.float16, format=format, layout="shared")),
        # Beyond a chunk of d, which has other loops.
        *(row for dim in (1, 136) for row in rows(["int8"], MIXED | {"dim": dim}, dtype=torch.float16, masked=False)),
        *rows(["fp8"], MIXED | {"dim": 136}, dtype=torch.float16, masked=False),
        *rows(["int8"], MIXED | {"dim": 72}, dtype=torch.float16, masked=False, format="int8 by token"),
        # Decompressed first: for many queries, for float32, on a GPU without e4m3; several blocks of documents.
        *(row for format in ("residual 2", "plaid", "fp8") for row in rows([format.split()[0].replace("plaid", "residual")], MIXED, (), constant(compressed, TOKENS_AT_ONCE=100, has_fp8=lambda device: False), format=format)),
        *rows(["residual"], MIXED, (), constant(compressed, FUSED_ROWS=0), dtype=torch.float16),
    ],
    "SPLADE": [
        *rows(["splade", "splade, two logs", "splade, relu", "splade, maxima"], {"dim": 40, "rows": 50}),
        *rows(["splade"], {}, dim=17, rows=33, masked=False),
        *rows(["splade"], {}, rows=1, bias=False),
        # Back to back, whose gradient no zeros are filled in before, of more than 1024 numbers a token.
        *rows(["splade"], {}, documents=(1, 9, 0, 2), dim=1030, rows=5, masked=False, gapless=True),
    ],
    "projection": [
        *rows(["project"], {}, dim=32, hidden=64, documents=(50,)),
        *rows(["project, any length"], {}, dim=48, hidden=80, documents=(50,)),
        *rows(["project"], {}, dim=48, hidden=80, bias=False),
        *rows(["project"], {}, dim=7, hidden=33),
        *rows(["project"], {}, dim=100, hidden=96),
        *(row for count in (0, 1, 16, 33) for row in rows(["project"], {}, documents=(count,), gapless=True, dim=40, hidden=48, masked=False)),
        *rows(["project"], {}, dim=70, hidden=64, dtype=torch.float16),
    ],
    "nothing": [
        *(row for sizes in ({"queries": ()}, {"documents": ()}, {"queries": (0,), "documents": (0,)}, {"layout": "shared", "slots": 0}) for row in rows(["maxsim", "xtr 2", "softmax 1.0", "top 2"], sizes)),
        *rows(["splade"], {}, documents=()),
        *rows(["splade"], {}, documents=(0, 0)),
        *rows(["splade"], {}, rows=0),
    ],
}  # fmt: skip
POISONED = {
    "ranks": [
        *rows(RANKS, OF_WINNERS, dim=80),
        *rows(RANKS, OF_WINNERS, layout="shared", slots=3),
        *rows(RANKS, OF_WINNERS, layout="own", slots=1, gapless=True),
        *rows(["maxsim", "top 3"], OF_WINNERS, gapless=True),
        *rows(["maxsim"], OF_WINNERS, layout="shared", slots=3, gapless=True),
        *rows(["maxsim", "top 3"], OF_WINNERS, dim=48, dtype=torch.float16),
        *rows(["top 3"], OF_WINNERS, dim=48, dtype=torch.bfloat16, layout="own", slots=1),
        # More than many documents have tokens, positions behind the 255 that uint8 holds, and more than 32 tiles.
        *rows(["top 64"], {"queries": (1, 9), "documents": (2, 40, 0, 530), "masked": False}, OF_64),
        *(row for size in (16, 64) for row in rows(["top 4"], OF_WINNERS, {(winner_backward, "document_gradient"): backward_tiles.DocumentGradientTiles(size, 16, 64, 32, 1, 4, 1)})),
    ],
    "parts": [
        *(row for entries in (1, 100) for row in rows(["maxsim", "top 4"], OF_WINNERS, (), constant(winner_backward, BUCKET_ENTRIES=entries))),
        *rows(["top 4"], OF_WINNERS, (), constant(winner_backward, WINNERS_AT_ONCE=32)),
        *(row for pairs in (0, 2**26) for row in rows(["maxsim"], OF_WINNERS, (), constant(winner_backward, QUADRATIC_ORDER=pairs), layout="shared", slots=3)),
    ],
    "no more pairs than documents": [
        row
        for scanned in (0, 2**13)
        for queries, gapless in ((SHORT, scanned > 0), (LONG, scanned == 0))
        for layout in ("own", "shared")
        for row in rows(["maxsim"], FEW_PAIRS, (), constant(winner_backward, SCANNED_PAIRS=scanned, BLOCK_SCAN=4), queries=queries, gapless=gapless, layout=layout)
    ],
}  # fmt: skip


def flat(table):
    return [
        pytest.param(*row, id=f"{name}, {i}, {row[0]}") for name, found in table.items() for i, row in enumerate(found)
    ]


@pytest.mark.interpret
@pytest.mark.parametrize("name, options, tiles, constants", flat(ROWS))
def test_interpreted(small, monkeypatch, name, options, tiles, constants):
    choose(monkeypatch, tiles, constants)
    slack = 3.0 if options.get("dtype") == torch.bfloat16 else 1.0  # the interpreter cuts off where a GPU rounds
    check(name, problem(name, **options), slack=slack, may_be_unclear="queries" in options)


@pytest.mark.interpret
@pytest.mark.parametrize("name, options, tiles, constants", flat(POISONED))
def test_gradients_of_winners_interpreted(small, monkeypatch, name, options, tiles, constants):
    choose(monkeypatch, tiles, constants)
    slack = 3.0 if options.get("dtype") == torch.bfloat16 else 1.0
    check(name, problem(name, **options), poisoned=True, slack=slack)


@pytest.mark.interpret
@pytest.mark.parametrize("name", ["maxsim", "xtr 12", "softmax 0.2", "top 3", "splade", "project"])
def test_tiles_of_the_table(interpreted, name):  # noqa: F811
    check(name, problem(name, queries=(40,), documents=(70, 1), dim=32, masked=False), may_be_unclear=True)


# Few whole numbers, so that each maximum occurs again and again, in the same column modulo 8 and in others.
TIES = [("maxsim", {(maxsim, "forward"): FORWARD._replace(block_n=width)}, width) for width in (32, 64, 128)]
TIES += [("top 3", OF_64, 64), ("top 9", OF_64, 64), ("splade, relu", {}, 32), ("xtr 2", {}, 32), ("xtr 12", {}, 32)]


@pytest.mark.interpret
@pytest.mark.parametrize("name, tiles, width", TIES)
@pytest.mark.parametrize("layout, masked", [("all", False), ("shared", True)])
def test_the_first_of_equal_maxima_wins_in_tiles_of_any_width(small, monkeypatch, name, tiles, width, layout, masked):
    choose(monkeypatch, tiles)
    sizes = {"queries": (7, 3), "documents": (300 if name == "maxsim" else 70, 1, 5, width, 2 * width + 1)}
    case = problem(name, dim=4, integers=True, masked=masked, layout=layout, floor=masked, slots=3, **sizes)
    check_exactly(name, case, 0.0 if name.startswith(("maxsim", "splade")) else 1e-6)


@pytest.mark.interpret
@pytest.mark.parametrize("constants", PLACES, ids=str)
def test_equal_similarities_pass_together_in_every_round(small, monkeypatch, constants):
    choose(monkeypatch, {}, constants)
    for name in ("xtr 1", "xtr 12"):
        check_exactly(name, problem(name, dim=8, integers=True, queries=(3, 2), documents=(40, 3, 34)), 1e-6)


@pytest.mark.interpret
def test_equal_maxima_of_int8_go_to_the_first_token(small):
    """Whole numbers with scales of 1, so that similarities are exact, in documents of more tokens than a tile."""
    case = problem("maxsim", dim=8, integers=True, documents=(70, 1, 40, 33, 9, 64), masked=False)
    for batch in case.batches.values():
        batch.values.clamp_(-1, 1)[:, 0] = 127
    check_exactly("int8", replace(case, documents=compressed_as(case.documents, "int8")))


@pytest.mark.interpret
@pytest.mark.parametrize(
    "name, layout",
    [("maxsim", "all"), ("maxsim", "shared"), ("xtr 5", "shared"), ("splade", "all"), ("project", "all")],
)
def test_strided_tensors_and_each_gradient_alone(small, name, layout):
    sizes = {"queries": (5, 0, 3), "documents": (7, 0, 20), "rows": 33, "masked": layout == "shared"}
    case = problem(name, layout=layout, floor=name == "maxsim", **sizes)
    check_layouts(name, case)


@pytest.mark.interpret
@pytest.mark.parametrize(
    "name", ["maxsim", "top 2", "top 9", "softmax 1.0", "log-sum-exp", "xtr 2", "xtr 30, retrieved"]
)
def test_nan_shows_and_stays_where_it_is_used(small, monkeypatch, name):
    choose(monkeypatch, OF_64)
    check_nan(name)


@pytest.mark.interpret
@pytest.mark.parametrize("layout", ["all", "shared", "own"])
def test_a_gradient_of_nan_shows(small, layout):
    for name in ("maxsim", "top 3"):
        case = problem(name, **OF_WINNERS, layout=layout, slots=1, gapless=True)
        _, *gradients = outcome(OPERATORS[name].call, case, torch.full(OPERATORS[name].call(case).shape, torch.nan))
        assert all(gradient.isnan().any() for gradient in gradients)


@pytest.mark.interpret
@pytest.mark.parametrize("where", ["documents", "weight", "bias"])
@pytest.mark.parametrize("name", ["splade", "splade, maxima"])
def test_nan_and_infinity_in_splade(small, where, name):
    check_nan_in_splade(name, where)


@pytest.mark.interpret
def test_texts_of_splade_that_share_rows(small):
    case = problem("splade", rows=20)
    repeated = torch.tensor([4, 2, 4, 4, 2, 4, 4, 4, 2, 2])
    shared = replace(case, documents=case.documents.select(repeated))
    assert torch.equal(OPERATORS["splade"].call(shared), OPERATORS["splade"].call(case)[repeated])


@pytest.mark.interpret
def test_large_and_zero_similarities(small):
    for k in (1, 2, 5):
        case = problem(f"xtr {k}", queries=(3,), documents=(2, 2, 2), dim=1, masked=False, gapless=True)
        numbers = torch.tensor([1e38, -1e38, 0.0, -0.0, 1.0, -1.0])[:, None]
        check_exactly(
            f"xtr {k}", case.with_leaves({"queries": torch.tensor([[1.0], [-1.0], [0.0]]), "documents": numbers}), 1e-6
        )


@pytest.mark.interpret
@pytest.mark.parametrize("dim", [32, 70])
def test_projected_rows_without_a_gradient_are_not_read(small, dim):
    check_rows_without_a_gradient(problem("project", documents=(64,), dim=dim, hidden=48, masked=False, gapless=True))


@pytest.mark.interpret
@pytest.mark.parametrize("normalize", [True, False])
def test_of_nothing_to_project_the_bias_is_left(small, normalize):
    name = "project" if normalize else "project, any length"
    case = problem(name, documents=(20,), hidden=0, masked=False, gapless=True)
    found, wanted = (outcome(each, case, random_gradient(case, (20, 16))) for each in OPERATORS[name][:2])
    torch.testing.assert_close(found, wanted)
    assert found[3].any()


@pytest.mark.interpret
def test_what_is_not_a_number_shows_in_a_projection(small):
    case = problem("project", documents=(20,), masked=False, gapless=True)
    case.documents.values[2, 3], case.documents.values[4, 1] = torch.nan, torch.inf
    grad = random_gradient(case, (20, 16))
    grad[7, 0] = torch.nan
    embeddings, gradient, *_ = outcome(OPERATORS["project"].call, case, grad)
    assert embeddings.isnan().all(dim=1).nonzero().flatten().tolist() == [2, 4]
    assert gradient.isnan().all(dim=1).nonzero().flatten().tolist() == [2, 4, 7]


@pytest.mark.interpret
@pytest.mark.parametrize("precision", ["high", "medium"])
@pytest.mark.parametrize("name", ["maxsim", "project"])
def test_lower_precision_of_float32_interpreted(small, name, precision):
    check(name, problem(name, dim=40, masked=False), precision=precision)


def check_rounded(values: torch.Tensor, device: str) -> None:
    values[3], values[5, 6], values[7, 8] = 0, torch.nan, torch.inf
    for format in ("int8", "fp8"):
        rounded, scales = rounded_queries(values, format)
        actual, actual_scales = compressed.round_rows(values.to(device), rounded.dtype)
        torch.testing.assert_close(actual_scales.cpu(), scales, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(actual.cpu().float(), rounded.float())


@pytest.mark.interpret
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_queries_are_rounded_as_on_a_cpu_interpreted(interpreted, dtype):  # noqa: F811
    values = torch.randn(40, 70, generator=torch.Generator().manual_seed(0)).mul(torch.logspace(-9, 9, 40)[:, None])
    check_rounded(values.to(dtype), "cpu")


@pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=pytest.mark.interpret), pytest.param(CUDA, marks=pytest.mark.cuda)]
)
def test_autocast_of_a_projection(request, device):
    """The weight is of another dtype than the hidden states then, and its gradient is not rounded."""
    if device == "cpu":
        request.getfixturevalue("small")
    sizes = {"hidden": 48, "dim": 32} if device == "cpu" else {"hidden": 768, "dim": 128}
    case = problem("project", documents=(40,), gapless=True, masked=False, device=device, **sizes)
    grad = random_gradient(case, (40, sizes["dim"]))
    with torch.autocast(device, torch.bfloat16):
        ours = outcome(OPERATORS["project"].call, case, grad)
    exact = outcome(OPERATORS["project"].definition, case.exact(), grad)
    assert ours[0].dtype == torch.bfloat16 and {each.dtype for each in ours[1:]} == {torch.float32}
    assert not torch.equal(ours[2], ours[2].bfloat16().float())
    for mine, wanted in zip(ours, exact, strict=True):
        assert (mine - wanted).norm() < 2e-2 * wanted.norm()
