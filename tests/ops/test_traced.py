"""Operators as PyTorch registers, compiles, exports and differentiates them."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from pylate_fastmaxsim import TokenBatch, TopK, maxsim, pooled_scores, splade_pool
from pylate_fastmaxsim import xtr_scores as xtr_of
from pylate_fastmaxsim.ops.encoder import attention, layers  # noqa: F401
from tests.support.attention_cases import case as attention_case
from tests.support.attention_cases import rotary_arguments
from tests.support.layer_cases import glu_case, norm_case
from tests.support.operator_checks import outcome, random_gradient
from tests.support.operators import OPERATORS, Problem, problem

TRACED = ["maxsim", "top 2", "softmax 0.2", "log-sum-exp", "xtr 5", "xtr 5, retrieved", "splade", "splade, maxima"]
TRACED += ["project", "from hidden both", "int8", "fp8", "residual"]
xtr_scores, top_2 = partial(xtr_of, k=5), partial(pooled_scores, pooling=TopK(2))


class Recorded(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "pylate_fastmaxsim":
            self.calls.append((function, args))
        return function(*args, **(kwargs or {}))


def detached(arguments) -> list:
    return [each.detach() if isinstance(each, torch.Tensor) else each for each in arguments]


def without_heads(arguments) -> list:
    """Of ``rotary_self_attention`` those of the registered operator."""
    return [each for place, each in enumerate(arguments) if place != 8]


def _layers() -> dict[str, tuple]:
    registered = torch.ops.pylate_fastmaxsim
    batch, none, drops = attention_case([5, 7], 3), (None, 0.0), (torch.tensor([3]), 0.4)
    texts = (*(values.requires_grad_() for values in batch[:3]), *batch[3:])
    x, weight, _, _, branch, _ = detached(norm_case(9, 24, "cpu"))
    norm = branch, x, x, *torch.native_layer_norm(x, (24,), weight, None, 1e-5)[1:], weight
    return {
        "attention": (registered.text_attention, (*texts, *none)),
        "attention, dropout": (registered.text_attention, (*texts, *drops)),
        "rotary attention": (registered.rotary_self_attention, (*without_heads(rotary_arguments()), *none)),
        "rotary attention, dropout": (
            registered.rotary_self_attention,
            (*without_heads(rotary_arguments(bias=False)), *drops),
        ),
        "glu": (registered.geglu_linear, glu_case(9, 24, "cpu", torch.float64)),
        "glu without bias": (registered.geglu_linear, glu_case(9, 24, "cpu", torch.float64, bias=False)),
        "norm": (registered.norm_with_residual_backward, (*norm, None, True, False)),
        "norm of a branch": (registered.norm_with_residual_backward, (*norm, torch.bfloat16, False, True)),
    }


def learned(case: Problem) -> Problem:
    return case.with_leaves({leaf: values.nan_to_num().requires_grad_() for leaf, values in case.leaves.items()})


@pytest.mark.parametrize("name", _layers())
def test_layers_are_registered_as_torch_asks(name):
    torch.library.opcheck(*_layers()[name])


@pytest.mark.parametrize("name", TRACED)
def test_operators_are_registered_as_torch_asks(name):
    case = problem(name, dim=8, rows=9, floor=True)
    case = case.with_leaves({leaf: values.nan_to_num() for leaf, values in case.leaves.items()})
    with Recorded() as recorded:
        OPERATORS[name].call(case)
        OPERATORS[name].call(learned(case)).float().sum().backward()
    assert any("backward" in str(function) for function, _ in recorded.calls) and len(recorded.calls) >= 3
    for function, arguments in recorded.calls:
        if name != "fp8":  # which the check itself cannot compare
            torch.library.opcheck(function, detached(arguments), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("name", TRACED)
def test_one_graph(name):
    case = problem(name, layout="shared", masked=False)
    call = OPERATORS[name].call
    compiled = torch.compile(lambda leaves: call(case.with_leaves(leaves)), backend="aot_eager", fullgraph=True)
    grad = random_gradient(case, call(case).shape)
    assert all(map(torch.equal, outcome(lambda each: compiled(each.leaves), case, grad), outcome(call, case, grad)))
    torch._dynamo.reset()


def test_any_shape_without_a_graph_break_or_a_second_compilation():
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
            results = [function(*arguments) for function in (loss, compiled)]
            torch.testing.assert_close(*results)
            torch.testing.assert_close(*(torch.autograd.grad(each, arguments[:2]) for each in results))


class Module(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.forward = function


def _of_texts(queries, documents, documents_mask):
    return splade_pool(documents, queries.flatten(0, 1), mask=documents_mask, activation_function="log1p_relu")


# Winners of documents of up to 255 tokens have another dtype than those of longer ones; without gradients there are none.
@pytest.mark.parametrize(
    "operator, length, strict",
    [(maxsim, 300, True), (xtr_scores, 6, False), (top_2, 300, True), (_of_texts, 6, True)],
    ids=["maxsim", "xtr", "top", "splade"],
)
def test_exported_with_any_number_of_queries_documents_and_tokens(operator, length, strict):
    def inputs(queries, documents, length):
        return torch.randn(queries, 3, 8), torch.randn(documents, length, 8), torch.rand(documents, length) < 0.7

    def scored(queries, documents, mask):
        return operator(queries, documents, documents_mask=mask)

    of_documents = {0: torch.export.Dim("others"), 1: torch.export.Dim("tokens", min=2, max=512)}
    sizes = {0: torch.export.Dim("some")}, of_documents, of_documents
    program = torch.export.export(Module(scored), inputs(2, 5, length), dynamic_shapes=sizes, strict=strict).module()
    for other_length in (4, 400):
        arguments = inputs(4, 7, other_length)
        torch.testing.assert_close(program(*arguments), scored(*arguments))


@pytest.mark.compile
@torch._inductor.config.patch(cpp_cache_precompile_headers=False)  # which takes longer than the few kernels
def test_inductor():
    weight, bias = torch.nn.Parameter(torch.randn(9, 8)), torch.nn.Parameter(torch.randn(9))

    def head(hidden, mask):
        return splade_pool(hidden, weight, bias, mask=mask)

    compiled = torch.compile(head, fullgraph=True, dynamic=True)
    for texts in (5, 7):
        arguments = torch.randn(texts, 6, 8), torch.rand(texts, 6) < 0.7
        results = compiled(*arguments), head(*arguments)
        torch.testing.assert_close(*results)
        torch.testing.assert_close(*(torch.autograd.grad(x.square().sum(), (weight, bias)) for x in results))


@pytest.mark.parametrize("operator", [maxsim, xtr_scores], ids=["maxsim", "xtr_scores"])
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
    fitting = torch.arange(0, 60 * len(bounds), 60)
    exported = torch.export.export(Module(score), (*arguments, fitting)).module()
    for run in (torch.compile(score, backend="aot_eager", fullgraph=True), exported):
        torch.testing.assert_close(run(*arguments, fitting), score(*arguments, fitting))
        with pytest.raises(ValueError, match=f"TokenBatch: {sentence}"):
            run(*arguments, torch.tensor(bounds))


@pytest.mark.parametrize("name", ["splade", "int8"])
def test_lengths_that_do_not_fit_are_refused_where_the_graph_is_run(name):
    case = problem(name, masked=False)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def run(lengths):
        return OPERATORS[name].call(replace(case, documents=replace(case.documents, lengths=lengths)))

    assert torch.equal(run(case.documents.lengths), OPERATORS[name].call(case))
    with pytest.raises(ValueError, match="lengths must be from 0 to max_length"):
        run(case.documents.lengths + case.documents.max_length)


@pytest.mark.parametrize("operator", [maxsim, xtr_scores], ids=["maxsim", "xtr_scores"])
def test_queries_that_share_rows_are_refused_where_the_graph_is_run(operator):
    def score(queries, documents, index):
        return operator(TokenBatch.from_padded(queries).select(index), documents)

    arguments = torch.randn(2, 3, 4, requires_grad=True), torch.randn(5, 6, 4)
    compiled = torch.compile(score, backend="aot_eager", fullgraph=True)
    compiled(*arguments, torch.tensor([1, 0]))
    with pytest.raises(ValueError, match="queries must not share rows of values where gradients are wanted"):
        compiled(*arguments, torch.tensor([0, 0]))


@pytest.mark.parametrize("function", [maxsim, xtr_scores], ids=["maxsim", "xtr_scores"])
def test_an_exported_program_has_gradients_or_says_that_it_has_none(function):
    queries, documents = (torch.randn(*shape, requires_grad=True) for shape in ((3, 4, 5), (4, 6, 5)))
    plain = torch.export.export(Module(function), (queries.detach(), documents.detach()), strict=False).module()
    scores = plain(queries, documents)
    torch.testing.assert_close(scores, function(queries, documents))
    with pytest.raises(RuntimeError, match="these scores pass no gradient, .* require a gradient.$"):
        scores.sum().backward()
    learning = torch.export.export(Module(function), (queries + 0, documents + 0), strict=False).module()
    results = (each(queries, documents).square().sum() for each in (learning, function))
    torch.testing.assert_close(*(torch.autograd.grad(each, (queries, documents)) for each in results))


@pytest.mark.parametrize("name", ["maxsim", "top 2", "softmax 0.2", "xtr 5", "splade", "project", "int8"])
def test_second_derivatives_are_refused(name):
    case = learned(problem(name, masked=False))
    leaf = next(iter(case.leaves.values()))
    (gradient,) = torch.autograd.grad(OPERATORS[name].call(case).square().sum(), leaf, create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivatives"):
        gradient.sum().backward()


def _dual(f, x):
    with forward_ad.dual_level():
        f(forward_ad.make_dual(x, torch.ones_like(x)))


TRANSFORMS = {
    "dual numbers": _dual,
    "vmap": lambda f, x: torch.vmap(f)(x[None]),
    "grad": lambda f, x: torch.func.grad(lambda y: f(y).sum())(x),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (torch.ones_like(x),)),
    "compiled vmap": lambda f, x: torch.compile(torch.vmap(f), backend="eager")(x[None]),
}


@pytest.mark.parametrize("name", ["maxsim", "int8", "top 2", "xtr 5", "project", "from hidden documents", "splade"])
def test_transforms_are_refused(name):
    case = problem(name, masked=False)
    for leaf, values in case.leaves.items():
        for transform in TRANSFORMS if name == "maxsim" else [*TRANSFORMS][:-1]:
            with pytest.raises(NotImplementedError, match="not supported"):
                TRANSFORMS[transform](lambda x, leaf=leaf: OPERATORS[name].call(case.with_leaves({leaf: x})), values)
    torch._dynamo.reset()
