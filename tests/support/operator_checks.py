"""Checks of operators against their definitions in float64.

They hold for the CPU path, for kernels in Triton's interpreter and for kernels on a GPU alike. In a near tie another token
may win than in float64. So the gradient of a score whose winners rounding may change is 0 there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import torch
from torch import Tensor

from tests.support.operators import OPERATORS, Operator, Problem, problem

# Relative errors, in the Frobenius norm, of results and of gradients.
TOLERANCE = {
    (torch.float64, "highest"): (1e-11, 1e-11),
    (torch.float32, "highest"): (5e-6, 1e-5),
    (torch.float32, "high"): (5e-5, 1e-4),
    (torch.float32, "medium"): (4e-3, 5e-3),
    (torch.float16, "highest"): (2e-5, 1e-3),
    (torch.bfloat16, "highest"): (2e-5, 4e-3),
}


def random_gradient(problem: Problem, shape: torch.Size, integers: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    drawn = torch.randint(-2, 3, shape, generator=generator) if integers else torch.randn(shape, generator=generator)
    return drawn.to(problem.documents.device, torch.float32)


def outcome(function: Callable[[Problem], Tensor], problem: Problem, grad: Tensor, *names: str) -> list[Tensor]:
    """Results and the gradients of ``names``, or of all inputs that have one."""
    names = names or tuple(problem.leaves)
    leaves = {name: leaf.detach().clone(memory_format=torch.preserve_format) for name, leaf in problem.leaves.items()}
    for name in names:
        leaves[name].requires_grad_()
    results = function(problem.with_leaves(leaves))
    if results.grad_fn is None:  # where nothing counts the definition has no graph
        return [results, *(torch.zeros_like(leaves[name]) for name in names)]
    wanted = [leaves[name] for name in names]
    found = torch.autograd.grad(results, wanted, grad.to(results.dtype), allow_unused=True)
    return [results.detach(), *(torch.zeros_like(x) if g is None else g for g, x in zip(found, wanted, strict=True))]


def defined(operator: Operator, problem: Problem, grad: Tensor) -> list[Tensor]:
    """Results and gradients of the definition in float64, some rows at a time."""
    results, gradients = [], None
    for rows, part in problem.exact().parts():
        own, *more = outcome(operator.definition, part, grad[rows])
        results.append(own)
        gradients = more if gradients is None else [a + b for a, b in zip(gradients, more, strict=True)]
    return [torch.cat(results), *gradients]


def clear_results(operator: Operator, problem: Problem, gap: float) -> Tensor | None:
    exact = problem.exact()
    found = [operator.clear(part, gap) for _, part in exact.parts()]
    return None if found[0] is None else torch.cat(found)


def relative_error(ours: Tensor, exact: Tensor) -> float:
    """In the Frobenius norm."""
    return ((ours.double() - exact).norm() / exact.norm().clamp_min(1e-30)).item()


@contextmanager
def uninitialized_memory_as_nan() -> Iterator[None]:
    """Unwritten memory shows: new memory holds NaN, or for integers 1, a possible winner."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()

    def filling(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def filled(*arguments, **keywords) -> Tensor:
            tensor = make(*arguments, **keywords)
            return tensor if tensor.is_floating_point() else tensor.fill_(1)

        return filled

    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with (
            mock.patch.object(torch, "empty", filling(torch.empty)),
            mock.patch.object(Tensor, "new_empty", filling(Tensor.new_empty)),
        ):
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@contextmanager
def float32_products(precision: str) -> Iterator[None]:
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest")


def check(
    name: str,
    problem: Problem,
    *,
    precision: str = "highest",
    slack: float = 1.0,
    poisoned: bool = False,
    may_be_unclear: bool = False,
) -> None:
    """AssertionError unless results and gradients are those of the definition, and the results without gradients too.

    ``poisoned``: the first query and the first document are NaN, and the scores that they take part in have gradient 0.
    ``may_be_unclear``: there may be no gradient to compare.
    """
    operator, exact = OPERATORS[name], problem
    dtype = problem.leaves["documents" if problem.queries is None else "queries"].dtype
    slack *= operator.slack[dtype in (torch.bfloat16, torch.float16)]
    of_results, of_gradients = TOLERANCE[dtype, precision]
    if poisoned:
        for batch in problem.batches.values():
            batch.values[batch.starts[0] : batch.starts[0] + batch.lengths[0]] = torch.nan
        exact = problem.exact()
    with torch.no_grad(), float32_products(precision), uninitialized_memory_as_nan():
        alone = operator.call(problem)
    shape = alone.shape
    grad = random_gradient(problem, shape)
    clear = clear_results(operator, problem, min(2e-2, max(5 * of_results * slack, 1e-5)))
    if poisoned:
        columns = torch.arange(shape[1]).expand(shape) if problem.candidates is None else problem.candidates
        columns = columns.to(grad.device)
        clear &= (columns != 0) & (torch.arange(shape[0], device=grad.device) != 0)[:, None]
    if clear is not None:
        assert may_be_unclear or clear.numel() == 0 or clear.any(), "nothing is compared"
        grad = grad.masked_fill(~clear, 0)
    with float32_products(precision), uninitialized_memory_as_nan():
        results, *gradients = outcome(operator.call, problem, grad)
    assert torch.equal(alone.nan_to_num(), results.nan_to_num()), "results without gradients"
    wanted, *exact_gradients = defined(operator, exact, grad)
    if operator.jumps or poisoned:
        results, wanted = results[clear], wanted[clear]
    kept = name.startswith("project") or dtype == torch.float64
    assert results.dtype == (dtype if kept else torch.float32)
    assert relative_error(results, wanted) <= of_results * slack, "results"
    for leaf, ours, gold in zip(problem.leaves, gradients, exact_gradients, strict=True):
        assert ours.dtype == problem.leaves[leaf].dtype and ours.shape == gold.shape
        bound = of_gradients * max(1.0, slack if slack < 20 else 2.0)
        assert relative_error(ours, gold) <= bound, f"gradient of {leaf}"
        if leaf != "bias":
            assert not ours[gold.abs().sum(dim=1) == 0].any(), f"gradient of {leaf} that nothing uses"


def check_exactly(name: str, problem: Problem, tolerance: float = 0.0) -> None:
    """As :func:`check` of small integers, for which nothing rounds, so that ties abound: the same bits, or nearly so."""
    operator = OPERATORS[name]
    with torch.no_grad(), uninitialized_memory_as_nan():
        shape = operator.call(problem).shape
    grad = random_gradient(problem, shape, integers=True)
    with uninitialized_memory_as_nan():
        found = outcome(operator.call, problem, grad)
    names = ("results", *problem.leaves)
    for what, ours, wanted in zip(names, found, defined(operator, problem, grad), strict=True):
        wanted = wanted if what == "results" else wanted.to(problem.leaves[what].dtype)
        if tolerance == 0.0:
            assert torch.equal(ours.to(wanted.dtype), wanted), what
        else:
            bound = max(tolerance, torch.finfo(ours.dtype).eps)
            torch.testing.assert_close(
                ours.double(), wanted.double(), rtol=bound, atol=16 * bound, msg=lambda m, w=what: f"{w}: {m}"
            )


def check_layouts(name: str, problem: Problem, tolerance: float = 0.0) -> None:
    """The same, whichever gradients are asked for, and where numbers of arguments and gradient do not lie one after the other."""
    call, device = OPERATORS[name].call, problem.documents.device
    with torch.no_grad():
        shape = call(problem).shape
    for grad in (torch.ones(1, 1, device=device).expand(shape), random_gradient(problem, shape)):
        expected = outcome(call, problem, grad.contiguous())
        found = outcome(call, problem.each(spread_out), grad if grad.stride() == (0, 0) else spread_out(grad))
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    results, *gradients = expected
    for leaf, wanted in zip(problem.leaves, gradients, strict=True):
        again, alone = outcome(call, problem, grad, leaf)
        assert torch.equal(again, results) and torch.equal(alone, wanted), f"gradient of {leaf} alone"


def check_rows_without_a_gradient(problem: Problem) -> None:
    """Of a projection: rows whose gradient is 0 are not read, and vectors that are shorter than epsilon stay short."""
    problem = replace(problem, bias=None)
    hidden, shape = problem.documents.values, torch.Size((len(problem.documents.values), len(problem.weight)))
    grad = random_gradient(problem, shape)
    grad[::3], grad[16:32] = 0, 0
    hidden[1:3] *= torch.tensor([[0.0], [1e-15]], device=hidden.device)
    expected = outcome(OPERATORS["project"].definition, problem.exact(), grad)
    live = grad.any(dim=1)
    hidden[~live] = torch.nan
    results, *gradients = outcome(OPERATORS["project"].call, problem, grad)
    torch.testing.assert_close(results[live].double(), expected[0][live], rtol=1e-5, atol=1e-6)
    assert not gradients[0][~live].any()
    for ours, wanted in zip(gradients, expected[1:], strict=True):
        assert relative_error(ours, wanted) < 1e-5


def spread_out(tensor: Tensor) -> Tensor:
    """The same numbers, not one after the other: a matrix by columns, other tensors with a gap between any two."""
    if tensor.dim() > 1:
        strided = tensor.t().contiguous().t()
    else:
        strided = torch.stack([tensor, ~tensor if tensor.dtype == torch.bool else -tensor], dim=1).flatten()[::2]
    assert torch.equal(strided.nan_to_num(), tensor.nan_to_num())
    assert min(tensor.shape) < 2 or not strided.is_contiguous()
    return strided


def check_nan(name: str) -> None:
    """A live token of NaN shows in what uses it, one that is masked nowhere."""
    case = problem(name, queries=(3, 2, 0), documents=(20, 40, 5, 3), masked=False)
    nan = case.documents.starts[1] + torch.tensor([30, 35])
    case.documents.values[nan] = torch.nan
    keep = torch.ones(len(case.documents.values), dtype=torch.bool)
    keep[nan] = False
    hidden = replace(case, documents=replace(case.documents, keep=keep))
    empty = replace(case, documents=replace(case.documents, keep=torch.zeros_like(keep)))
    for each, columns in ((case, [False, True, False, False]), (hidden, [False] * 4)):
        scores, *gradients = outcome(OPERATORS[name].call, each, torch.ones(3, 4))
        assert scores.isnan().tolist() == [columns] * 2 + [[False] * 4]
        begin, length = int(case.documents.starts[1]), 40
        assert not gradients[1][:begin].isnan().any() and not gradients[1][begin + length :].isnan().any()
        assert gradients[0].isnan().any() == any(columns) or name.startswith("top")  # which may pass it to no token
    nothing = outcome(OPERATORS[name].call, empty, torch.ones(3, 4))
    assert not any(each.nan_to_num().any() or each.isnan().all() for each in nothing)
    hidden.queries.values[case.queries.starts[0] + 1] = torch.nan
    assert OPERATORS[name].call(hidden).isnan().tolist() == [[True] * 4, [False] * 4, [False] * 4]


def check_nan_in_splade(name: str, where: str) -> None:
    """NaN shows in the values that use it, and in their gradients; rows of infinity are as in the definition."""
    case = problem(name, documents=(5, 9, 0), masked=False, rows=20)
    infinite = case.bias.clone()
    infinite[3], infinite[17] = -torch.inf, torch.inf  # rows that are never to be chosen
    banned = replace(case, bias=infinite)
    torch.testing.assert_close(
        OPERATORS[name].call(banned).double(), OPERATORS[name].definition(banned), rtol=2e-6, atol=2e-6
    )
    place = (case.documents.starts[1] + 3, 2) if where == "documents" else (7, 0) if where == "weight" else (7,)
    case.leaves[where][place] = -torch.nan
    expected = torch.zeros(3, 20, dtype=torch.bool)
    expected[(1, slice(None)) if where == "documents" else (slice(2), 7)] = True
    values, *gradients = outcome(OPERATORS[name].call, case, torch.ones(3, 20))
    assert torch.equal(values.isnan(), expected)
    if name == "splade":
        assert all(gradient.isnan().any() for gradient in gradients)
        assert torch.equal(gradients[2].isnan(), expected.any(dim=0))
