"""MaxSim beyond its numbers: errors, autocast, memory, dispatch, and PyLate's rule for masked tokens."""

import logging
import sys

import pytest
import torch

from pylate_fastmaxsim import TokenBatch, maxsim, reference
from pylate_fastmaxsim._operands import ScoringOperands
from pylate_fastmaxsim._winners import winner_dtype
from pylate_fastmaxsim.cpu import maxsim as blocked
from pylate_fastmaxsim.ops import operands
from tests.support.largest_tensor import LargestTensor
from tests.support.on_gpu import no_waiting
from tests.support.ragged_batches import CANDIDATES, batches


def with_gradients(queries, documents, *args, **kwargs):
    q_values, d_values = queries.values.clone().requires_grad_(), documents.values.clone().requires_grad_()
    scores = maxsim(queries.with_values(q_values), documents.with_values(d_values), *args, **kwargs)
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(scores.shape, generator=generator, dtype=scores.dtype).to(scores.device)
    return scores.detach(), *torch.autograd.grad((scores * weights).sum(), (q_values, d_values))


@pytest.mark.parametrize("candidates", [None, CANDIDATES], ids=["all", "candidates"])
def test_gradcheck(candidates):
    queries, documents = batches(torch.float64, dim=3)
    zero_floor = torch.tensor([True, False, False, True, False, False])

    def scores(q_values, d_values):
        return maxsim(queries.with_values(q_values), documents.with_values(d_values), candidates, zero_floor=zero_floor)

    inputs = tuple(batch.values.nan_to_num().requires_grad_() for batch in (queries, documents))
    assert torch.autograd.gradcheck(scores, inputs)


@pytest.mark.parametrize("candidates", [None, CANDIDATES], ids=["all", "candidates"])
def test_block_sizes_do_not_matter(candidates, monkeypatch):
    queries, documents = batches(torch.float64)
    expected = with_gradients(queries, documents, candidates)
    for size in (1, 7, 40):
        for name in ("BLOCK_ELEMENTS", "SLAB_ELEMENTS", "FEW_ELEMENTS", "WINNER_ELEMENTS"):
            monkeypatch.setattr(blocked, name, size)
        torch.testing.assert_close(with_gradients(queries, documents, candidates), expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("candidates", [False, True], ids=["all", "candidates"])
def test_no_similarity_tensor_is_held(candidates):
    queries, documents = batches(dim=2, queries=(32,) * 24, documents=(150, 40, 60, 1000) * 40, masked=False)
    index = torch.arange(160).repeat(24, 1) if candidates else None
    similarities = 4 * 24 * 32 * 160 * 1000
    operands = ScoringOperands.of(queries, documents, index)
    with LargestTensor() as forward:
        scores, winners = blocked.forward(operands, True, "highest")
    with LargestTensor() as backward:
        blocked.backward(scores, winners, operands, "highest", True, True)
    assert winners.dtype == torch.int16
    assert forward.bytes <= 4 * blocked.BLOCK_ELEMENTS <= 32 * 2**20 < similarities / 10
    assert backward.bytes <= 8 * blocked.WINNER_ELEMENTS


def test_winners_are_computed_only_for_a_gradient(monkeypatch):
    asked = []

    def forward(*arguments):
        asked.append(arguments[1])
        return blocked_forward(*arguments)

    blocked_forward = blocked.forward
    monkeypatch.setattr(blocked, "forward", forward)
    queries, documents = batches()
    maxsim(queries, documents)
    learned = documents.with_values(documents.values.clone().requires_grad_())
    with torch.no_grad():
        maxsim(queries, learned)
    maxsim(queries, learned)
    torch.compile(maxsim, backend="eager", fullgraph=True)(queries, documents)
    assert asked == [False, False, True, False]


def test_only_one_side_needs_a_gradient():
    queries, documents = batches()
    _, grad_q, grad_d = with_gradients(queries, documents)
    weights = torch.randn(5, 6, generator=torch.Generator().manual_seed(1))
    for side, both in ((0, grad_q), (1, grad_d)):
        inputs = [queries, documents]
        values = inputs[side].values.clone().requires_grad_()
        inputs[side] = inputs[side].with_values(values)
        (maxsim(*inputs) * weights).sum().backward()
        assert torch.equal(values.grad, both)


def test_autocast_casts_as_einsum_does():
    queries, documents = batches()
    low = [batch.with_values(batch.values.to(torch.bfloat16)) for batch in (queries, documents)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scores, grad_q, grad_d = with_gradients(queries, documents)
        mixed = maxsim(queries, low[1])
        double = maxsim(*(batch.with_values(batch.values.double()) for batch in (queries, documents)))
    assert scores.dtype == grad_q.dtype == grad_d.dtype == torch.float32
    assert torch.equal(scores, maxsim(*low))
    assert torch.equal(scores, mixed)
    assert double.dtype == torch.float64
    assert not torch.equal(scores, maxsim(queries, documents))


@pytest.mark.parametrize(
    ("length", "dtype"), [(255, torch.uint8), (256, torch.int16), (32767, torch.int16), (32768, torch.int32)]
)
def test_the_last_token_of_a_long_document_can_win(length, dtype):
    documents = torch.zeros(1, length, 1)
    documents[0, -1] = 1
    documents.requires_grad_()
    maxsim(torch.ones(1, 1, 1), documents).sum().backward()
    assert documents.grad.nonzero().tolist() == [[0, length - 1, 0]]
    assert winner_dtype(length) == dtype


def test_rows_of_queries_that_were_not_selected_cost_no_backward(monkeypatch):
    queries, documents = torch.randn(100, 4, 8, requires_grad=True), torch.randn(5, 6, 8, requires_grad=True)
    chosen = torch.tensor([90, 3, 7])
    mask = torch.arange(4) < torch.tensor([2, 4, 3])[:, None]
    whole = TokenBatch.from_padded(queries, torch.ones(100, 4).index_put((chosen,), mask.float()))
    gathered, weighted_sums = [], blocked.weighted_sums
    monkeypatch.setattr(
        blocked, "weighted_sums", lambda *inputs: gathered.append(inputs[-1].numel()) or weighted_sums(*inputs)
    )
    weights = torch.randn(3, 5)
    of_few = torch.autograd.grad((maxsim(whole.select(chosen), documents) * weights).sum(), (queries, documents))
    assert gathered[0] == mask.sum()
    few = maxsim(queries[chosen], documents, queries_mask=mask)
    torch.testing.assert_close(of_few, torch.autograd.grad((few * weights).sum(), (queries, documents)))


def test_zero_floor_is_the_rule_of_stock_pylate():
    """PyLate multiplies similarities by the mask, so where a token is masked no maximum is below 0."""
    scores = pytest.importorskip("pylate.scores")
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn(4, 5, 2, generator=generator, dtype=torch.float64)
    documents = torch.randn(6, 4, 2, generator=generator, dtype=torch.float64)
    queries_mask = torch.rand(4, 5, generator=generator) < 0.8
    documents_mask = torch.rand(6, 4, generator=generator) < 0.7
    documents_mask[0], documents_mask[1] = True, False

    def gradients(function, **masks):
        inputs = queries.clone().requires_grad_(), documents.clone().requires_grad_()
        result = function(*inputs, **masks)
        return result, *torch.autograd.grad(result.square().sum(), inputs)

    masks = {"queries_mask": queries_mask, "documents_mask": documents_mask}
    ours = gradients(maxsim, **masks, zero_floor=~documents_mask.all(dim=1))
    stock = gradients(scores.colbert_scores, **{name: mask.double() for name, mask in masks.items()})
    torch.testing.assert_close(ours, stock)
    assert not torch.allclose(maxsim(queries, documents, **masks), ours[0])


def test_second_derivatives_are_refused():
    queries, documents = (torch.randn(2, 3, 4, requires_grad=True) for _ in range(2))
    (gradient,) = torch.autograd.grad(maxsim(queries, documents).square().sum(), queries, create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivatives"):
        gradient.sum().backward()


Q, D = torch.zeros(2, 3, 4), torch.zeros(5, 6, 4)
JAGGED = torch.nested.nested_tensor([torch.ones(3, 4), torch.ones(5, 4)], layout=torch.jagged)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((Q[0], D), {}, ValueError, r"padded queries must be \[N, L, d\], got torch.float32 of shape \(3, 4\)"),
        ((Q, D), {"queries_mask": torch.ones(2, 4)}, ValueError, r"queries_mask must be \[N, L\] = \[2, 3\]"),
        ((Q, TokenBatch.from_padded(D)), {"documents_mask": torch.ones(5, 6)}, ValueError, "documents_mask goes with"),
        ((Q, D.to("meta")), {}, ValueError, "queries are on cpu and documents on meta"),
        ((Q, D[..., :3]), {}, ValueError, "queries have d = 4 and documents d = 3"),
        ((Q, D, torch.zeros(3, 1, dtype=torch.int64)), {}, ValueError, r"candidates must be int64 \[Nq, K\] with Nq"),
        ((Q, D), {"zero_floor": torch.zeros(4, dtype=torch.bool)}, ValueError, r"zero_floor must be bool \[Nd\]"),
        ((Q.numpy(), D), {}, TypeError, "queries must be a TokenBatch or a tensor .* got ndarray"),
        (
            (Q, D),
            {"zero_floor": [False] * 5},
            TypeError,
            r"zero_floor must be a tensor bool \[Nd\] with Nd = 5, got list",
        ),
        ((Q.to("meta"), D.to("meta")), {}, ValueError, "queries are on the meta device"),
        ((Q, JAGGED), {}, ValueError, r"documents must be a plain tensor \[N, L, d\], got a nested one; .* x.offsets"),
    ],
)
def test_errors_say_what_is_allowed(arguments, options, error, message):
    with pytest.raises(error, match=f"maxsim: .*{message}"):
        maxsim(*arguments, **options)


@pytest.mark.parametrize("capability, suffices", [((7, 5), False), ((8, 0), True), ((12, 1), True)])
def test_older_gpus_are_scored_by_pytorch_and_that_is_said_once(capability, suffices, monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    operands.has_kernels.cache_clear()
    with caplog.at_level(logging.WARNING, "pylate_fastmaxsim"):
        assert [operands.has_kernels(torch.device("cuda", 0)) for _ in range(2)] == [suffices] * 2
    operands.has_kernels.cache_clear()
    assert [("capability 8.0 or newer" in message) for message in caplog.messages] == [True] * (not suffices)


def test_without_triton_cuda_tensors_are_scored_by_pytorch_and_that_is_said_once(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "pylate_fastmaxsim.kernels.maxsim.launch", None)
    monkeypatch.delattr("pylate_fastmaxsim.kernels.maxsim.launch", raising=False)
    operands._has_triton.cache_clear()
    with caplog.at_level(logging.WARNING, "pylate_fastmaxsim"):
        assert not operands._has_triton() and not operands._has_triton()
    operands._has_triton.cache_clear()
    assert len(caplog.records) == 1 and "Triton cannot be imported" in caplog.text


@pytest.mark.cuda
@pytest.mark.parametrize("candidates", [None, CANDIDATES], ids=["all", "candidates"])
def test_float64_on_cuda_is_the_definition_and_repeatable(candidates):
    def on_cuda(batch):
        return TokenBatch(*(x.cuda() for x in (batch.values, batch.starts, batch.lengths)), 25, batch.keep.cuda())

    queries, documents = batches(torch.float64)
    expected = with_gradients(queries, documents, candidates)
    candidates = None if candidates is None else candidates.cuda()
    first, second = (with_gradients(on_cuda(queries), on_cuda(documents), candidates) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    torch.testing.assert_close(tuple(each.cpu() for each in first), expected)
    torch.testing.assert_close(first[0], reference.maxsim(on_cuda(queries), on_cuda(documents), candidates))


@pytest.mark.cuda
def test_a_training_step_on_cuda_never_waits_for_the_device():
    queries = torch.randn(4, 32, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    documents = torch.randn(8, 100, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    mask = torch.rand(8, 100, device="cuda") < 0.7
    candidates = torch.randint(0, 8, (4, 3), device="cuda")

    def step():
        (
            maxsim(queries, documents, documents_mask=mask).sum() + maxsim(queries, documents, candidates).sum()
        ).backward()

    step()  # compiles the kernels
    with no_waiting():
        step()
