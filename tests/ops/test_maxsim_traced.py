"""MaxSim as PyTorch compiles, exports and traces it."""

from functools import partial

import pytest
import torch

from pylate_fastmaxsim import TokenBatch, maxsim, xtr_scores
from pylate_fastmaxsim._operands import ScoringOperands
from pylate_fastmaxsim.cpu import maxsim as blocked
from tests.support.ragged_batches import CANDIDATES, batches


@pytest.mark.parametrize("candidates", [None, CANDIDATES], ids=["all", "candidates"])
@pytest.mark.parametrize("want_winners", [False, True])
def test_opcheck(candidates, want_winners):
    queries, documents = batches(dim=3)
    values = [batch.values.nan_to_num().requires_grad_(want_winners) for batch in (queries, documents)]
    batches_ = [batch.with_values(each) for batch, each in zip((queries, documents), values, strict=True)]
    operands = ScoringOperands.of(*batches_, candidates)
    torch.library.opcheck(torch.ops.pylate_fastmaxsim.maxsim_forward.default, (*operands, want_winners))
    if want_winners:
        detached = ScoringOperands(*(x.detach() if torch.is_tensor(x) else x for x in operands))
        scores, winners = blocked.forward(detached, True, "highest")
        for needs in ((True, True), (True, False), (False, True)):
            torch.library.opcheck(
                torch.ops.pylate_fastmaxsim.maxsim_backward.default, (scores, winners, *detached, *needs)
            )


def test_torch_compile_takes_any_shape_without_a_graph_break_or_a_second_compilation():
    def loss(queries, documents, queries_mask, documents_mask, candidates):
        masks = {"queries_mask": queries_mask, "documents_mask": documents_mask}
        all_pairs = maxsim(2 * queries, documents, **masks)
        listed = maxsim(TokenBatch.from_padded(queries), documents, candidates, documents_mask=documents_mask)
        return all_pairs.logsumexp(1).sum() + listed.sum()

    def inputs(queries, query_length, documents, document_length):
        shapes = (queries, query_length, 8), (documents, document_length, 8)
        values = [torch.randn(shape, requires_grad=True) for shape in shapes]
        masks = [torch.rand(shape[:2]) < 0.7 for shape in shapes]
        return *values, *masks, torch.randint(0, documents, (queries, 2))

    compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend="aot_eager")
    compiled(*inputs(3, 5, 7, 11)).backward()
    with torch.compiler.set_stance("fail_on_recompile"):
        for shape in ((4, 6, 8, 12), (2, 9, 5, 40)):
            arguments = inputs(*shape)
            expected = loss(*arguments)
            expected_gradients = torch.autograd.grad(expected, arguments[:2])
            actual = compiled(*arguments)
            torch.testing.assert_close(actual, expected)
            torch.testing.assert_close(torch.autograd.grad(actual, arguments[:2]), expected_gradients)


class Module(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.forward = function


# Winners of documents of up to 255 tokens have another dtype than those of longer ones; without gradients there are
# none.
@pytest.mark.parametrize(
    "operator, length, strict",
    [(maxsim, 300, True), (partial(xtr_scores, k=5), 6, False)],
    ids=["maxsim", "xtr_scores"],
)
def test_exported_with_any_number_of_queries_documents_and_tokens(strict, operator, length):
    def inputs(queries, documents, length):
        return torch.randn(queries, 3, 8), torch.randn(documents, length, 8), torch.rand(documents, length) < 0.7

    some, others = torch.export.Dim("some"), torch.export.Dim("others")
    tokens = torch.export.Dim("tokens", min=2, max=512)
    sizes = {0: some}, {0: others, 1: tokens}, {0: others, 1: tokens}
    scores = Module(lambda queries, documents, mask: operator(queries, documents, documents_mask=mask))
    program = torch.export.export(scores, inputs(2, 5, length), dynamic_shapes=sizes, strict=strict).module()
    for other_length in (4, 400):
        arguments = inputs(4, 7, other_length)
        torch.testing.assert_close(program(*arguments), scores(*arguments))


@pytest.mark.parametrize("operator", [maxsim, partial(xtr_scores, k=1)], ids=["maxsim", "xtr_scores"])
@pytest.mark.parametrize(
    ("bounds", "sentence"),
    [
        ([0, 300], "lengths must be from 0 to max_length = 200, got 300 to 300"),
        ([0, 3, 2], "lengths must be from 0 to max_length = 200, got -1 to 3"),
        ([0, 150, 301], "sequences must lie in the rows 0 to T = 300 of values, got 0 to 301"),
    ],
)
def test_numbers_that_do_not_fit_are_refused_where_the_graph_is_run(operator, bounds, sentence):
    def score(queries, values, bounds):
        return operator(queries, TokenBatch.from_packed(values, bounds, max_length=200))

    arguments = torch.ones(1, 1, 1), torch.rand(300, 1, requires_grad=True)
    compiled = torch.compile(score, backend="aot_eager", fullgraph=True)
    fitting = torch.arange(0, 60 * len(bounds), 60)
    exported = torch.export.export(Module(score), (*arguments, fitting)).module()
    for run in (compiled, exported):
        torch.testing.assert_close(run(*arguments, fitting), score(*arguments, fitting))
        with pytest.raises(ValueError, match=f"TokenBatch: {sentence}"):
            run(*arguments, torch.tensor(bounds))


@pytest.mark.parametrize("operator", [maxsim, partial(xtr_scores, k=4)], ids=["maxsim", "xtr_scores"])
def test_queries_that_share_rows_are_refused_where_the_graph_is_run(operator):
    def score(queries, documents, index):
        return operator(TokenBatch.from_padded(queries).select(index), documents)

    arguments = torch.randn(2, 3, 4, requires_grad=True), torch.randn(5, 6, 4)
    compiled = torch.compile(score, backend="aot_eager", fullgraph=True)
    compiled(*arguments, torch.tensor([1, 0]))
    with pytest.raises(ValueError, match="queries must not share rows of values where gradients are wanted"):
        compiled(*arguments, torch.tensor([0, 0]))


def test_compiled_autograd_takes_the_backward_whole():
    queries, documents = torch.randn(2, 3, 4, requires_grad=True), torch.randn(5, 6, 4, requires_grad=True)
    expected = torch.autograd.grad(maxsim(queries, documents).square().sum(), (queries, documents))
    whole = torch.compile(backend="aot_eager", fullgraph=True)
    with torch._dynamo.compiled_autograd._enable(whole):
        maxsim(queries, documents).square().sum().backward()
    torch.testing.assert_close((queries.grad, documents.grad), expected)


@pytest.mark.parametrize("function", [maxsim, partial(xtr_scores, k=4)], ids=["maxsim", "xtr_scores"])
def test_an_exported_program_has_gradients_or_says_that_it_has_none(function):
    def vectors(*shape):
        return torch.randn(*shape, dtype=torch.float64, requires_grad=True)

    queries, documents = vectors(3, 4, 5), vectors(4, 6, 5)
    plain = torch.export.export(Module(function), (queries.detach(), documents.detach()), strict=False).module()
    scores = plain(queries, documents)
    torch.testing.assert_close(scores, function(queries, documents))
    with pytest.raises(RuntimeError, match="these scores pass no gradient, .* require a gradient.$"):
        scores.sum().backward()
    learning = torch.export.export(Module(function), (vectors(3, 4, 5), vectors(4, 6, 5)), strict=False).module()
    gradients = [
        torch.autograd.grad(each(queries, documents).square().sum(), (queries, documents))
        for each in (learning, function)
    ]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("function", [maxsim, partial(xtr_scores, k=4)], ids=["maxsim", "xtr_scores"])
def test_a_batch_of_gradients(function):
    """As torch.autograd.functional.jacobian takes them with vectorize."""
    inputs = torch.randn(3, 4, 5, dtype=torch.float64), torch.randn(4, 6, 5, dtype=torch.float64)
    jacobians = [torch.autograd.functional.jacobian(function, inputs, vectorize=each) for each in (True, False)]
    torch.testing.assert_close(*jacobians)
