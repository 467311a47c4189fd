"""Operators on a CPU against their definitions in float64: results, gradients, ties, dtypes and precisions."""

from functools import partial

import pytest
import torch

from pylate_fastmaxsim import LogSumExp, Max, Softmax, TopK, maxsim, maxsim_from_hidden, pooled_scores, xtr_scores
from pylate_fastmaxsim._dtypes import float32_precision  # which only kernels read: no result on a CPU shows it
from pylate_fastmaxsim.cpu import maxsim as blocked
from pylate_fastmaxsim.ops import pooled
from tests.support.operator_checks import (
    check,
    check_exactly,
    check_layouts,
    outcome,
    random_gradient,
)
from tests.support.operators import FORMATS, OPERATORS, problem
from tests.support.ragged_batches import batches
from tools import fuzz_operators


@pytest.mark.parametrize("name", OPERATORS)
def test_random_shapes(name, capsys):
    """Any d, lengths, masks, candidates, floors and dtype, empty batches among them."""
    given = ["--operator", name, "--count", "7", "--products", "500000", "--families", "1000"]
    assert fuzz_operators.main(given) == 0, capsys.readouterr().out


# A mean and a quotient round.
@pytest.mark.parametrize(
    "name, tolerance",
    [(name, 0.0) for name in ("maxsim", "top 2", "splade, relu", "splade, maxima")]
    + [(name, 1e-6) for name in ("top 3", "top 9", "xtr 2", "xtr 12", "xtr 5, retrieved", "xtr 5000, retrieved")],
)
def test_whole_numbers_give_the_definition_bit_by_bit(name, tolerance, monkeypatch):
    """The first of equal maxima wins, and of equal similarities the lower positions count."""
    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    for number in range(24):
        monkeypatch.setattr(blocked, "FEW_ELEMENTS", (0, 1 << 11)[number % 2])
        _, given = fuzz_operators.options(number, 1, 1000, 2**19, dtypes, name)
        check_exactly(name, problem(name, **given, integers=True), tolerance)


@pytest.mark.parametrize("layout", ["all", "shared"])
@pytest.mark.parametrize("format", FORMATS)
def test_formats(format, layout):
    name = format.split()[0].replace("plaid", "residual")
    for dtype in (torch.float64, torch.float32, torch.float16):
        check(name, problem(name, dim=24, dtype=dtype, layout=layout, format=format))


@pytest.mark.parametrize("numbers", [1, 24 * 12, 1 << 26])
@pytest.mark.parametrize("layout", ["all", "shared"])
@pytest.mark.parametrize("format", FORMATS)
def test_compressed_documents_are_pooled_as_they_decompress(format, layout, numbers, monkeypatch):
    monkeypatch.setattr(pooled, "DECOMPRESSED_NUMBERS", numbers)
    case = problem(format.split()[0].replace("plaid", "residual"), dim=24, layout=layout, format=format)
    queries, last = case.queries, torch.arange(len(case.documents)).flip(0)
    values = queries.values.requires_grad_()
    for documents, pooling in ((case.documents, TopK(3)), (case.documents.select(last), Softmax(0.2))):
        found = [
            pooled_scores(queries, each, case.candidates, pooling=pooling)
            for each in (documents, documents.decompress(values.dtype))
        ]
        torch.testing.assert_close(*found)
        torch.testing.assert_close(*(torch.autograd.grad(each.sum(), values)[0] for each in found))


@pytest.mark.parametrize(
    "name", ["maxsim", "top 3", "softmax 0.2", "xtr 5", "int8", "splade", "project", "from hidden both"]
)
def test_each_gradient_alone_and_strided_tensors(name):
    case = problem(name, layout="shared", floor=True)
    check_layouts(name, case, 1e-5)
    with torch.no_grad():
        assert not OPERATORS[name].call(case).requires_grad


@pytest.mark.parametrize("name", ["maxsim", "top 3", "softmax 0.2", "log-sum-exp", "xtr 5", "splade", "residual"])
def test_autocast_casts_as_einsum_does(name):
    case = problem(name, masked=False)
    low = {leaf: values if leaf == "bias" else values.bfloat16() for leaf, values in case.leaves.items()}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scores = OPERATORS[name].call(case)
        grad = random_gradient(case, scores.shape)
        _, *gradients = outcome(OPERATORS[name].call, case, grad)
        if name in ("maxsim", "xtr 5"):
            mixed = OPERATORS[name].call(case.with_leaves({"documents": low["documents"]}))
            assert torch.equal(mixed, scores)
        if name != "residual":
            wide = case.with_leaves({leaf: values.double() for leaf, values in case.leaves.items()})
            assert OPERATORS[name].call(wide).dtype == torch.float64
    assert scores.dtype == torch.float32 and {gradient.dtype for gradient in gradients} == {torch.float32}
    assert torch.equal(scores, OPERATORS[name].call(case.with_leaves(low)))
    assert not torch.equal(scores, OPERATORS[name].call(case))


def test_autocast_leaves_whole_numbers_and_float64_alone():
    for name in ("int8", "fp8", "project"):
        case = problem(name, masked=False, dtype=torch.float64 if name == "project" else torch.float32)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            unchanged = OPERATORS[name].call(case)
            if name == "project":
                for other in ({"weight": case.weight.float()}, {"documents": case.documents.values.float()}):
                    with pytest.raises(ValueError, match="project_normalize: hidden states are .* must have one dtype"):
                        OPERATORS[name].call(case.with_leaves(other))
        assert torch.equal(unchanged, OPERATORS[name].call(case))


def test_gradients_of_a_weight_are_not_rounded_under_autocast():
    case = problem("project", documents=(300,), masked=False, dim=32, hidden=64)
    with torch.autocast("cpu", torch.bfloat16):
        # Here too, as where the region spans a training step.
        found = outcome(OPERATORS["project"].call, case, random_gradient(case, (len(case.documents.values), 32)))
    assert [each.dtype for each in found] == [torch.bfloat16] + [torch.float32] * 3
    assert not torch.equal(found[2], found[2].bfloat16().float())


def test_poolings_that_are_the_maximum_are_maxsim():
    queries, documents = batches()
    floor = torch.ones(len(documents), dtype=torch.bool)
    score = partial(pooled_scores, queries, documents)
    expected = maxsim(queries, documents)
    for pooling in (Max(), TopK(1)):
        assert torch.equal(score(pooling=pooling), expected)
    # Only the maximum starts at the floor.
    floored = maxsim(queries, documents, zero_floor=floor)
    assert not torch.equal(floored, expected) and torch.equal(score(pooling=Max(), zero_floor=floor), floored)
    for pooling in (TopK(1), TopK(2), Softmax(1.0)):
        assert torch.equal(score(pooling=pooling, zero_floor=floor), score(pooling=pooling))
    for pooling in (kind(value) for kind in (Softmax, LogSumExp) for value in (1e-30, 1e30)):
        assert score(pooling=pooling).isfinite().all()


def test_slopes_of_small_and_large_values_are_precise():
    for name in ("splade", "splade, two logs"):
        case = problem(name, documents=(1,), dim=1, rows=40, masked=False, bias=False)
        leaves = {"documents": torch.ones_like(case.documents.values), "weight": torch.logspace(-30, 30, 40)[:, None]}
        case = case.with_leaves(leaves)
        ours = outcome(OPERATORS[name].call, case, torch.ones(1, 40))
        wanted = outcome(OPERATORS[name].definition, case.exact(), torch.ones(1, 40))
        for mine, exact, bound in zip(ours[::2], wanted[::2], (1e-6, 2e-5), strict=True):
            torch.testing.assert_close(mine.double(), exact, rtol=bound, atol=0)


OLDER, PRODUCTS = torch.set_float32_matmul_precision, torch.backends.cuda.matmul
SETTINGS = {
    "default": ([], "highest"),
    "older-high": ([(OLDER, "high")], "high"),
    "allow_tf32": ([(setattr, PRODUCTS, "allow_tf32", True)], "high"),
    "newer-tf32": ([(setattr, PRODUCTS, "fp32_precision", "tf32")], "high"),
    # What TrainingArguments(tf32=True) does.
    "everywhere-tf32": ([(setattr, torch.backends, "fp32_precision", "tf32")], "high"),
    "older-high-then-newer-ieee": ([(OLDER, "high"), (setattr, PRODUCTS, "fp32_precision", "ieee")], "highest"),
    "older-medium-then-not": ([(OLDER, "medium"), (setattr, PRODUCTS, "allow_tf32", False)], "highest"),
}


@pytest.fixture
def precisions_as_before():
    yield
    backends = torch.backends, PRODUCTS, torch.backends.mkldnn.matmul
    for each in backends:
        each.fp32_precision = "none"
    OLDER("highest")
    for each in backends[1:]:
        each.fp32_precision = "none"


@pytest.mark.skipif(not hasattr(torch.backends, "fp32_precision"), reason="this release has one way to say it")
@pytest.mark.parametrize("settings, expected", SETTINGS.values(), ids=SETTINGS)
def test_every_setting_of_float32_products_is_followed_and_stops_no_operator(settings, expected, precisions_as_before):
    queries, documents, weight = torch.randn(2, 3, 4), torch.randn(5, 6, 4), torch.randn(4, 4)

    def results():
        leaves = [tensor.clone().requires_grad_() for tensor in (queries, documents, weight)]
        q, d, w = leaves
        scores = [maxsim(q, d), xtr_scores(q, d, k=7), maxsim_from_hidden(q, d, w)]
        return [*scores, *torch.autograd.grad(sum(score.square().sum() for score in scores), leaves)]

    before = results()
    for function, *arguments in settings:
        function(*arguments)
    assert float32_precision(torch.float32) == expected
    assert float32_precision(torch.bfloat16) == float32_precision(torch.float64) == "highest"
    torch.testing.assert_close(results(), before, rtol=1e-2, atol=1e-2)
