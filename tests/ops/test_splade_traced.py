"""SPLADE's head in graphs: as a registered operator, compiled, and exported."""

import pytest
import torch

from pylate_fastmaxsim import TokenBatch, splade_pool
from tests.support.splade_problems import random_splade_problem


class Head(torch.nn.Module):
    def __init__(self, weight, bias):
        super().__init__()
        self.weight, self.bias = torch.nn.Parameter(weight), torch.nn.Parameter(bias)

    def forward(self, hidden, mask):
        return splade_pool(hidden, self.weight, self.bias, mask=mask, activation_function="log1p_relu")


def padded(seed, **options):
    problem = random_splade_problem(seed, **options)
    return Head(problem.weight, problem.bias), *problem.hidden.to_padded()


@pytest.mark.parametrize("want_winners", [False, True])
def test_registration(want_winners):
    problem = random_splade_problem(0)
    operands = problem.operands()._replace(hidden=problem.hidden.values.nan_to_num())
    torch.library.opcheck(torch.ops.pylate_fastmaxsim.splade_forward, (*operands, want_winners))
    if want_winners:
        values, winners = torch.ops.pylate_fastmaxsim.splade_forward(*operands, True)
        for needs in ((True, True, True), (False, True, False), (True, False, False)):
            arguments = (torch.ones_like(values), values, winners, *operands, *needs)
            torch.library.opcheck(torch.ops.pylate_fastmaxsim.splade_backward, arguments)


def test_the_operator_by_itself_is_differentiable():
    problem = random_splade_problem(1).with_gradients()
    values, _ = torch.ops.pylate_fastmaxsim.splade_forward(*problem.operands(), True)
    eager = splade_pool(*problem)
    assert torch.equal(values, eager)
    for ours, wanted in zip(
        *(torch.autograd.grad(x.square().sum(), problem.leaves) for x in (values, eager)), strict=True
    ):
        assert torch.equal(ours, wanted)


def test_a_graph_without_winners_passes_no_gradient_silently():
    problem = random_splade_problem(1).with_gradients()
    values, _ = torch.ops.pylate_fastmaxsim.splade_forward(*problem.operands(), False)
    with pytest.raises(RuntimeError, match="splade_pool: these .* pass no gradient"):
        values.sum().backward()


def test_one_graph_forward_and_backward():
    head, hidden, mask = padded(2)
    hidden.requires_grad_()
    leaves = (hidden, *head.parameters())
    results = []
    for function in (head, torch.compile(head, backend="aot_eager", fullgraph=True)):
        values = function(hidden, mask)
        results.append((values.detach(), *torch.autograd.grad(values.square().sum(), leaves)))
    assert all(map(torch.equal, *results))


@pytest.mark.compile
def test_inductor():
    head, hidden, mask = padded(3)
    compiled = torch.compile(head, fullgraph=True, dynamic=True)
    for texts in (slice(0, 5), slice(1, 8)):
        arguments = hidden[texts], mask[texts]
        values, own = compiled(*arguments), head(*arguments)
        torch.testing.assert_close(values, own)
        gradients = [torch.autograd.grad(x.square().sum(), tuple(head.parameters())) for x in (values, own)]
        torch.testing.assert_close(*gradients)


def test_an_exported_program_takes_other_batches():
    head, hidden, mask = padded(4)
    texts, tokens = torch.export.Dim("texts"), torch.export.Dim("tokens", max=255)
    shapes = {"hidden": {0: texts, 1: tokens}, "mask": {0: texts, 1: tokens}}
    program = torch.export.export(head.requires_grad_(False), (hidden, mask), dynamic_shapes=shapes).module()
    _, others, other_mask = padded(5, lengths=(4, 33, 2))
    assert torch.equal(program(others, other_mask), head(others, other_mask))


def test_sequences_that_do_not_fit_are_refused_where_the_graph_runs():
    problem = random_splade_problem(6, masked=False)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def run(lengths):
        hidden = problem.hidden
        return splade_pool(TokenBatch(hidden.values, hidden.starts, lengths, hidden.max_length), problem.weight)

    assert torch.equal(run(problem.hidden.lengths), splade_pool(problem.hidden, problem.weight))
    with pytest.raises(ValueError, match="lengths must be from 0 to max_length"):
        run(problem.hidden.lengths + problem.hidden.max_length)
