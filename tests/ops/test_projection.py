"""Projection, normalisation and MaxSim from hidden states, against the definition in float64."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from pylate_fastmaxsim import TokenBatch, maxsim_from_hidden, reference
from pylate_fastmaxsim.cpu import projection as cpu_projection
from pylate_fastmaxsim.ops.projection import project_normalize
from tests.support.exactness import relative_error
from tests.support.projection_exactness import TOLERANCE, check, problem


def ragged(generator, lengths, dim, keep=None):
    """Sequences in reverse order with an unused row of NaN behind each, and where masked NaN as well."""
    lengths = torch.tensor(lengths)
    ends = (lengths + 1).flip(0).cumsum(0).flip(0)
    starts = ends - lengths - 1
    values = torch.randn(int(ends[0]), dim, generator=generator, dtype=torch.float64)
    values[ends - 1] = torch.nan
    mask = None
    if keep is not None:
        mask = torch.rand(len(values), generator=generator) < keep
        values[~mask] = torch.nan
    return TokenBatch(values.requires_grad_(), starts, lengths, int(lengths.max()), mask)


@pytest.mark.parametrize("dtype, precision", TOLERANCE, ids=str)
@pytest.mark.parametrize("dim_in, dim_out", [(64, 32), (768, 128), (65, 33)])
def test_projection(dtype, precision, dim_in, dim_out):
    hidden, weight, bias, grad = problem(70, dim_in, dim_out, dtype, dead=0.3)
    # Rows without a gradient are not read.
    hidden[grad.eq(0).all(dim=1)] = torch.nan
    check(cpu_projection, hidden, weight, bias, grad, precision=precision)


@pytest.mark.parametrize("rows", [0, 1, 20])
def test_projection_in_blocks(rows, monkeypatch):
    monkeypatch.setattr(cpu_projection, "ROWS", 7)
    check(cpu_projection, *problem(rows, 16, 8))
    hidden, weight, _, grad = problem(rows, 16, 8)
    check(cpu_projection, hidden, weight, None, grad, normalize=False)
    # Vectors shorter than epsilon.
    hidden[:2] *= 1e-15
    hidden[2:4] = 0
    check(cpu_projection, hidden, weight, None, grad)


@pytest.mark.parametrize(
    "project, normalize, bias, layout",
    [
        ("documents", True, True, "all"),
        ("documents", False, False, "candidates"),
        ("queries", True, False, "candidates"),
        ("both", True, True, "candidates"),
        ("both", False, True, "all"),
    ],
)
def test_scores_and_gradients(project, normalize, bias, layout):
    generator = torch.Generator().manual_seed(0)
    dim_in, dim = 12, 5
    queries = ragged(generator, [4, 0, 3, 1], dim if project == "documents" else dim_in, keep=0.8)
    documents = ragged(generator, [1, 20, 0, 7, 9], dim if project == "queries" else dim_in, keep=0.7)
    weight = torch.randn(dim, dim_in, generator=generator, dtype=torch.float64).requires_grad_()
    offset = torch.randn(dim, generator=generator, dtype=torch.float64).requires_grad_() if bias else None
    candidates = torch.randint(5, (4, 3), generator=generator) if layout == "candidates" else None
    zero_floor = torch.tensor([True, False, False, True, False])
    scores = maxsim_from_hidden(
        queries, documents, weight, offset, normalize, candidates, project=project, zero_floor=zero_floor
    )
    grad = torch.randn(scores.shape, generator=generator, dtype=torch.float64)
    leaves = [queries.values, documents.values, weight] + [offset] * bias
    ours = torch.autograd.grad(scores, leaves, grad)

    plain = [batch.with_values(batch.values.detach().nan_to_num().requires_grad_()) for batch in (queries, documents)]
    sides = [
        batch.with_values(reference.project(batch.values, weight, offset, normalize))
        if project in (side, "both")
        else batch
        for side, batch in zip(("queries", "documents"), plain, strict=True)
    ]
    expected = reference.maxsim(*sides, candidates, zero_floor)
    torch.testing.assert_close(scores, expected)
    leaves[:2] = [batch.values for batch in plain]
    torch.testing.assert_close(ours, torch.autograd.grad(expected, leaves, grad))
    for own, batch in zip(ours, (queries, documents), strict=False):
        assert not own[batch.values.isnan().any(dim=1)].any()


def test_padded_tensors_and_masks():
    generator = torch.Generator().manual_seed(0)
    queries, hidden = torch.randn(3, 4, 5, generator=generator), torch.randn(2, 9, 7, generator=generator)
    weight, mask = torch.randn(5, 7, generator=generator), torch.rand(2, 9, generator=generator) < 0.5
    scores = maxsim_from_hidden(queries, hidden, weight, documents_mask=mask, queries_mask=torch.ones(3, 4))
    documents = TokenBatch.from_padded(F.normalize(hidden @ weight.T, dim=-1), mask)
    torch.testing.assert_close(scores, reference.maxsim(TokenBatch.from_padded(queries), documents))


def test_any_number_of_leading_dimensions():
    hidden, weight, bias, _ = problem(12, 6, 4)
    flat = project_normalize(hidden, weight, bias)
    assert torch.equal(project_normalize(hidden.view(2, 3, 2, 6), weight, bias), flat.view(2, 3, 2, 4))
    torch.testing.assert_close(project_normalize(hidden[0], weight, bias), flat[0])
    assert project_normalize(hidden.view(2, 3, 2, 6)[:, :0], weight).shape == (2, 0, 2, 4)


def test_autocast_casts_as_linear_does_and_gradients_of_the_weight_are_not_rounded():
    hidden, weight, bias, grad = (t.requires_grad_() for t in problem(300, 64, 32))
    with torch.autocast("cpu", torch.bfloat16):
        embeddings = project_normalize(hidden, weight, bias)
        stock = F.normalize(F.linear(hidden, weight, bias), dim=-1)
        scores = maxsim_from_hidden(torch.randn(2, 3, 32), hidden.view(3, 100, 64), weight, bias)
        # Here too, as where the region spans a training step.
        gradients = torch.autograd.grad(embeddings, (hidden, weight, bias), grad.bfloat16())
    assert embeddings.dtype == torch.bfloat16 and scores.dtype == torch.float32
    assert (embeddings - stock).abs().max() < 2e-2
    assert [gradient.dtype for gradient in gradients] == [torch.float32] * 3
    assert not torch.equal(gradients[1], gradients[1].bfloat16().float())
    exact = [t.detach().bfloat16().double().requires_grad_() for t in (hidden, weight)]
    exact.append(bias.detach().double().requires_grad_())
    expected = reference.project(*exact)
    # Little more than one rounding to bf16 makes.
    assert relative_error(embeddings, expected) < 2e-3
    expected = torch.autograd.grad(expected, exact, grad.detach().bfloat16().double())
    for own, other, bound in zip(gradients, expected, (2e-3, 1e-3, 1e-3), strict=True):
        assert relative_error(own, other) < bound


def test_float64_is_left_alone_by_autocast():
    hidden, weight, bias, _ = problem(20, 16, 8, torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        embeddings = project_normalize(hidden, weight, bias)
        for mixed in ((hidden, weight.float()), (hidden.float(), weight)):
            with pytest.raises(ValueError, match="project_normalize: hidden states are .* both must have one dtype"):
                project_normalize(*mixed)
    torch.testing.assert_close(embeddings, reference.project(hidden, weight, bias, True))


def test_compiled_code_takes_the_operator_without_a_break():
    hidden, weight, bias, _ = (t.requires_grad_() for t in problem(20, 6, 4))
    queries = torch.randn(2, 3, 4)

    def scores(hidden, weight, bias):
        return maxsim_from_hidden(queries, hidden.view(4, 5, 6), weight, bias)

    compiled = torch.compile(scores, backend="aot_eager", fullgraph=True)
    own, other = compiled(hidden, weight, bias), scores(hidden, weight, bias)
    torch.testing.assert_close(own, other)
    gradients = [torch.autograd.grad(each.sum(), (hidden, weight, bias)) for each in (own, other)]
    torch.testing.assert_close(*gradients)
    torch._dynamo.reset()


@pytest.mark.parametrize("shape", [(0,), (3, 0), (2, 3, 0), (0, 5)])
def test_nothing_to_project(shape):
    hidden, bias = torch.ones(shape, requires_grad=True), torch.tensor([3.0, 4.0], requires_grad=True)
    weight = torch.ones(2, shape[-1], requires_grad=True)
    embeddings, stock = project_normalize(hidden, weight, bias), F.normalize(F.linear(hidden, weight, bias), dim=-1)
    torch.testing.assert_close(embeddings, stock)
    grads = [torch.autograd.grad(each.square().sum(), (hidden, weight, bias)) for each in (embeddings, stock)]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("bias", [True, False])
def test_registered_as_torch_asks(bias):
    hidden, weight, offset, _ = problem(6, 5, 3, bias=bias)
    arguments = (hidden.requires_grad_(), weight.requires_grad_(), offset, True)
    torch.library.opcheck(torch.ops.pylate_fastmaxsim.project_forward.default, arguments)


def test_second_derivatives_are_refused():
    hidden, weight, _, _ = (t.requires_grad_() for t in problem(6, 5, 3))
    (first,) = torch.autograd.grad(project_normalize(hidden, weight).sum(), hidden, create_graph=True)
    with pytest.raises((NotImplementedError, RuntimeError), match="second derivatives|does not require grad"):
        torch.autograd.grad(first.sum(), hidden)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((torch.ones(2, 3), torch.ones(4, 5)), r"weight \[d, d_model\], got shapes \(2, 3\) and \(4, 5\)"),
        ((torch.ones(2, 3), torch.ones(4, 3).double()), "must have one dtype"),
        ((torch.ones(2, 3).int(), torch.ones(4, 3).int()), "hidden states must be bfloat16"),
        ((torch.ones(2, 3), torch.ones(4, 3), torch.ones(3)), r"bias must be torch.float32 \[d\] with d = 4"),
    ],
)
def test_what_does_not_fit_gets_one_sentence(arguments, message):
    with pytest.raises(ValueError, match=message):
        project_normalize(*arguments)


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"queries": [[[1.0, 2.0]]]}, TypeError, "queries must be a TokenBatch or a tensor"),
        ({"weight": [[1.0] * 4] * 2}, TypeError, "weight must be a tensor .* got list"),
        ({"bias": [0.0, 0.0]}, TypeError, "bias must be a tensor .* got list"),
        ({"normalize": None}, TypeError, "normalize must be True or False, got None."),
        ({"project": "neither"}, ValueError, "project must be .* got 'neither'"),
        ({"candidates": torch.zeros(3, 1, dtype=torch.int64)}, ValueError, r"candidates must be int64 \[Nq, K\] with"),
        ({"candidates": [[0]]}, TypeError, "candidates must be a tensor"),
        ({"zero_floor": torch.zeros(3)}, ValueError, r"zero_floor must be bool \[Nd\] with Nd = 2"),
        ({"documents_mask": torch.ones(2, 2)}, ValueError, r"documents_mask must be \[N, L\] = \[2, 3\]"),
    ],
)
def test_what_does_not_fit_is_found_before_anything_is_projected(options, error, message, monkeypatch):
    monkeypatch.setattr(cpu_projection, "forward", None)
    tensors = {"queries": torch.ones(1, 1, 2), "documents": torch.ones(2, 3, 4), "weight": torch.ones(2, 4)}
    with pytest.raises(error, match=f"^(maxsim_from_hidden|project_normalize): {message}"):
        maxsim_from_hidden(**tensors | options)
