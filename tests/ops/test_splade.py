"""SPLADE's head against its definition in float64 and against Sentence Transformers' pooling; what it refuses."""

import pytest
import torch
from sentence_transformers.sparse_encoder.models import SpladePooling

from pylate_fastmaxsim import TokenBatch, compress, reference, splade_pool
from pylate_fastmaxsim.cpu import splade as blocked
from tests.support.defined_winners import splade_winners
from tests.support.splade_problems import exact_splade, random_splade_problem

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
ACTIVATIONS = [("relu", True), ("log1p_relu", True), ("relu", False), (None, False)]


def results(problem, **options):
    """Values, a random gradient of them, and the gradients that it gives."""
    problem = problem.with_gradients()
    values = splade_pool(*problem, **options)
    grad = torch.randn(values.shape, generator=torch.Generator().manual_seed(1)).to(values.dtype)
    return values.detach(), grad, torch.autograd.grad(values, problem.leaves, grad)


def assert_close(ours, exact, tolerance):
    assert (ours.double() - exact).norm() <= tolerance * exact.norm() + 1e-30


@pytest.mark.parametrize("activation_function, log1p", ACTIVATIONS)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_values_and_gradients_are_those_of_the_definition(dtype, activation_function, log1p, monkeypatch):
    monkeypatch.setattr(blocked, "ROWS", 32)
    options = {"activation_function": activation_function, "log1p": log1p}
    # Integers are exact in all of these dtypes and tie. Of random vectors a near tie may go to another token.
    for integers, with_bias in ((True, True), (True, False), (dtype == torch.float32, True)):
        bias_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        problem = random_splade_problem(0, dtype=dtype, integers=integers, with_bias=with_bias, bias_dtype=bias_dtype)
        values, grad, gradients = results(problem, **options)
        exact, exact_gradients = exact_splade(problem, grad, **options)
        assert values.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert_close(values, exact, 1e-6)
        assert (values == 0).any() and (values[problem.hidden.lengths == 0] == 0).all()
        for leaf, ours, wanted in zip(problem.leaves, gradients, exact_gradients, strict=True):
            assert ours.dtype == leaf.dtype
            assert_close(ours, wanted, TOLERANCE[dtype])
        assert torch.equal(splade_pool(*problem, **options), values)


def test_the_reference_is_the_definition_of_every_text_by_itself():
    problem = random_splade_problem(1, integers=True, dtype=torch.float64, bias_dtype=torch.float64)
    hidden, weight, bias = problem.with_gradients()
    values = reference.splade_pool(hidden, weight, bias)
    own = []
    for start, length in zip(hidden.starts.tolist(), hidden.lengths.tolist(), strict=True):
        rows = slice(start, start + length)
        live = hidden.values[rows][hidden.keep[rows]]
        own.append(torch.log1p(torch.relu((live @ weight.T + bias).amax(0) if len(live) else torch.zeros(len(weight)))))
    assert torch.equal(values, torch.stack(own))
    # Of the masks and lengths some leave no token.
    winners = splade_winners(hidden, weight, bias)
    assert torch.equal(winners < 0, values == 0)


def test_winners_are_the_first_of_equal_tokens():
    problem = random_splade_problem(2, integers=True)
    for rectified in (True, False):
        _, winners = blocked.forward(problem.operands(rectified, 0), True, "highest")
        assert winners.dtype == torch.uint8
        exact = splade_winners(*problem, "relu" if rectified else None)
        assert torch.equal(winners.long(), torch.where(exact < 0, 255, exact))


@pytest.mark.parametrize("place", ["hidden", "weight", "bias"])
def test_nan_shows_in_what_uses_it_and_nowhere_else(place):
    problem = random_splade_problem(3, masked=False)
    hidden, weight, bias = problem
    token = hidden.starts[3] + 1
    {"hidden": hidden.values[token], "weight": weight[5], "bias": bias[5:6]}[place][0] = torch.nan
    values, _, (grad_hidden, grad_weight, grad_bias) = results(problem)
    uses = torch.zeros_like(values, dtype=torch.bool)
    uses[:, 5] = hidden.lengths > 0
    if place == "hidden":
        uses = torch.zeros_like(uses)
        uses[3] = True
    assert torch.equal(values.isnan(), uses)
    assert torch.equal(grad_bias.isnan(), uses.any(0)) and torch.equal(grad_weight.isnan().any(1), uses.any(0))
    for text, affected in enumerate(uses.any(1).tolist()):
        rows = slice(hidden.starts[text], hidden.starts[text] + hidden.lengths[text])
        assert grad_hidden[rows].isnan().any() == affected
    if place == "hidden":
        assert grad_hidden.isnan().any(1).nonzero().tolist() == [[token]]


def test_only_needed_gradients_are_computed():
    problem = random_splade_problem(4)
    _, grad, gradients = results(problem)
    for i in range(3):
        leaves = [tensor.detach().clone().requires_grad_(i == j) for j, tensor in enumerate(problem.leaves)]
        values = splade_pool(problem.hidden.with_values(leaves[0]), *leaves[1:])
        values.backward(grad)
        assert [leaf.grad is not None for leaf in leaves] == [i == j for j in range(3)]
        assert torch.equal(leaves[i].grad, gradients[i])
    with torch.no_grad():
        assert not splade_pool(*problem.with_gradients()).requires_grad


def test_backward_keeps_no_logits():
    """Of what is saved nothing has a size of tokens times vocabulary rows."""
    problem = random_splade_problem(5).with_gradients()
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.numel() * x.itemsize) or x, lambda x: x):
        values = splade_pool(*problem)
    tokens, vocabulary = len(problem.hidden.values), len(problem.weight)
    assert sizes and max(sizes) < tokens * vocabulary * 4
    assert values.numel() in sizes  # winners of one byte


@pytest.mark.parametrize("lengths, vocabulary", [((3, 5), 1), ((), 4), ((0, 0), 4), ((3,), 0), ((300, 2), 3)])
def test_extreme_sizes(lengths, vocabulary):
    problem = random_splade_problem(6, lengths=lengths, vocabulary=vocabulary, integers=True, bias_mean=4)
    values, grad, gradients = results(problem)
    exact, exact_gradients = exact_splade(problem, grad)
    assert values.shape == (len(lengths), vocabulary)
    for ours, wanted in zip((values, *gradients), (exact, *exact_gradients), strict=True):
        assert_close(ours, wanted, 1e-6)


@pytest.mark.parametrize("activation_function", ["relu", "log1p_relu"])
def test_it_is_the_pooling_of_sentence_transformers(activation_function):
    problem = random_splade_problem(7).with_gradients()
    hidden, mask = problem.hidden.to_padded()
    hidden = hidden.detach().requires_grad_()
    results = []
    for pooled in (
        splade_pool(hidden, *problem[1:], mask=mask.long(), activation_function=activation_function),
        SpladePooling("max", activation_function)(
            {"token_embeddings": hidden @ problem.weight.T + problem.bias, "attention_mask": mask}
        )["sentence_embedding"],
    ):
        results.append((pooled, *torch.autograd.grad(pooled.square().sum(), (hidden, *problem.leaves[1:]))))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_autocast_casts_hidden_states_and_weight():
    problem = random_splade_problem(8).with_gradients()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        values = splade_pool(*problem)
    hidden, weight, bias = problem
    rounded = splade_pool(hidden.with_values(hidden.values.bfloat16()), weight.bfloat16(), bias)
    assert torch.equal(values, rounded) and values.dtype == torch.float32
    gradients = torch.autograd.grad(values.sum(), problem.leaves)
    assert {gradient.dtype for gradient in gradients} == {torch.float32}
    wide = random_splade_problem(8, dtype=torch.float64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(splade_pool(*wide), splade_pool(*[*wide]))


HIDDEN = torch.ones(2, 3, 4)
WEIGHT = torch.ones(5, 4)


@pytest.mark.parametrize(
    "error, message, arguments, options",
    [
        (TypeError, "hidden states must be a TokenBatch or a tensor .N, L, d., got list", ([[1.0]], WEIGHT), {}),
        (TypeError, "hidden states are a CompressedBatch", (compress(TokenBatch.from_padded(HIDDEN), "int8"), WEIGHT), {}),
        (ValueError, "padded hidden states must be .N, L, d., got torch.float32 of shape .3, 4.", (HIDDEN[0], WEIGHT), {}),
        (ValueError, "mask goes with padded", (TokenBatch.from_padded(HIDDEN), WEIGHT), {"mask": torch.ones(2, 3)}),
        (ValueError, "mask must be .N, L. = .2, 3., got torch.float32 of shape .2, 2.", (HIDDEN, WEIGHT), {"mask": torch.ones(2, 2)}),
        (ValueError, "mask must hold 1 for tokens that count", (HIDDEN, WEIGHT), {"mask": torch.full((2, 3), 2)}),
        (TypeError, "weight must be a tensor .V, d., got list", (HIDDEN, [1.0]), {}),
        (ValueError, "weight must be .V, d. with d = 4, got torch.float32 of shape .4, 5.", (HIDDEN, WEIGHT.T), {}),
        (ValueError, "hidden states are torch.float32 and weight torch.float64", (HIDDEN, WEIGHT.double()), {}),
        (ValueError, "must be bfloat16, float16, float32 or float64", (HIDDEN.to(torch.float8_e5m2), WEIGHT.to(torch.float8_e5m2)), {}),
        (ValueError, "bias must be floating point .V. with V = 5, got torch.float32 of shape .4", (HIDDEN, WEIGHT, torch.ones(4)), {}),
        (ValueError, "bias must be floating point", (HIDDEN, WEIGHT, torch.ones(5).long()), {}),
        (ValueError, "weight must be on cpu, as the rest, got meta", (HIDDEN, WEIGHT.to("meta")), {}),
        (ValueError, "hidden states are on the meta device", (HIDDEN.to("meta"), WEIGHT.to("meta")), {}),
        (ValueError, 'activation_function must be "relu", "log1p_relu" or None, got .gelu', (HIDDEN, WEIGHT), {"activation_function": "gelu"}),
        (ValueError, "activation_function=None needs log1p=False", (HIDDEN, WEIGHT), {"activation_function": None}),
        (TypeError, "log1p must be True or False, got 1", (HIDDEN, WEIGHT), {"log1p": 1}),
    ],
)  # fmt: skip
def test_bad_input_is_one_sentence(error, message, arguments, options):
    with pytest.raises(error, match=f"^splade_pool: .*{message}"):
        splade_pool(*arguments, **options)


def test_texts_that_share_rows_have_no_gradient():
    texts = TokenBatch.from_padded(HIDDEN).select(torch.tensor([0, 0]))
    assert torch.equal(splade_pool(texts, WEIGHT), splade_pool(HIDDEN, WEIGHT))
    with pytest.raises(ValueError, match="splade_pool: texts must not share rows of values where gradients are wanted"):
        splade_pool(texts.with_values(texts.values.clone().requires_grad_()), WEIGHT)
    # The weight's gradient does not mind.
    splade_pool(texts, WEIGHT.clone().requires_grad_()).sum().backward()


@pytest.mark.parametrize("activation_function", ["relu", "log1p_relu"])
def test_small_and_large_values_and_their_slopes_are_precise(activation_function):
    """Relative to themselves, each."""
    weight = torch.logspace(-30, 30, 40)[:, None].requires_grad_()
    exact = weight.detach().double().requires_grad_()
    values = splade_pool(torch.ones(1, 1, 1), weight, activation_function=activation_function)
    wanted = reference.splade_pool(TokenBatch.from_padded(torch.ones(1, 1, 1)), exact, None, activation_function)
    torch.testing.assert_close(values.double(), wanted, rtol=1e-6, atol=0)
    gradients = [torch.autograd.grad(x.sum(), leaf)[0].double() for x, leaf in ((values, weight), (wanted, exact))]
    torch.testing.assert_close(*gradients, rtol=2e-5, atol=0)


def test_gradients_in_batches_are_those_one_by_one():
    problem = random_splade_problem(10, vocabulary=5).with_gradients()
    values = splade_pool(*problem)
    grads = torch.randn(3, *values.shape, generator=torch.Generator().manual_seed(0))
    batched = torch.autograd.grad(values, problem.leaves, grads, retain_graph=True, is_grads_batched=True)
    for i, grad in enumerate(grads):
        own = torch.autograd.grad(values, problem.leaves, grad, retain_graph=True)
        assert all(map(torch.equal, own, [gradient[i] for gradient in batched]))


def test_second_derivatives_are_refused():
    problem = random_splade_problem(9).with_gradients()
    gradient = torch.autograd.grad(splade_pool(*problem).sum(), problem.weight, create_graph=True)[0]
    with pytest.raises(NotImplementedError, match="splade_pool: second derivatives are not supported"):
        gradient.sum().backward()
