"""The projection's kernels on a GPU, against the definition in float64."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from pylate_fastmaxsim import TokenBatch, maxsim_from_hidden, reference
from pylate_fastmaxsim.ops.projection import project_normalize
from tests.support.on_gpu import DEVICE, captured, no_waiting
from tests.support.projection_exactness import TOLERANCE, check, problem

head = pytest.importorskip("pylate_fastmaxsim.kernels.projection.launch")
pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("dtype, precision", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    "dim_in, dim_out",
    [(64, 32), (768, 128), (768, 96), (384, 48), (1024, 256), (4096, 1024), (100, 33), (768, 300)],
)
def test_projection(dtype, precision, dim_in, dim_out):
    check(head, *problem(1000, dim_in, dim_out, dtype, dead=0.3, device=DEVICE), precision=precision)


@pytest.mark.parametrize("rows", [0, 1, 63, 64, 65, 129, 150_000])
@pytest.mark.parametrize("normalize", [True, False])
def test_numbers_of_rows(rows, normalize):
    check(head, *problem(rows, 768, 128, torch.bfloat16, device=DEVICE), normalize)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dim_out", [128, 512])
def test_rows_without_a_gradient_are_not_read(dtype, dim_out):
    hidden, weight, bias, grad = problem(2000, 768, dim_out, dtype, dead=0.9, device=DEVICE)
    grad[256:768] = 0
    hidden[grad.eq(0).all(dim=1)] = torch.nan
    check(head, hidden, weight, bias, grad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_runs_repeat_bit_by_bit(dtype):
    hidden, weight, bias, grad = problem(20_000, 768, 128, dtype, device=DEVICE)

    def run():
        saved = head.forward(hidden, weight, bias, True, "highest")
        return *saved, *head.backward(grad, hidden, weight, *saved, True, "highest", True, True, True)

    first = run()
    for _ in range(20):
        assert all(map(torch.equal, first, run()))


def leaves(dtype=torch.bfloat16, documents=64, length=100):
    generator = torch.Generator(DEVICE).manual_seed(0)
    shapes = (16, 32, 128), (documents, length, 768), (128, 768), (128,)
    tensors = [torch.randn(shape, device=DEVICE, generator=generator) for shape in shapes]
    tensors[0], tensors[2] = F.normalize(tensors[0], dim=-1), tensors[2] / 768**0.5
    return [tensor.to(dtype).requires_grad_() for tensor in tensors]


def step(queries, hidden, weight, bias, **options):
    scores = maxsim_from_hidden(queries, hidden, weight, bias, **options)
    return scores, *torch.autograd.grad(scores.sum(), (queries, hidden, weight, bias))


@pytest.mark.parametrize("layout", ["all", "candidates"])
def test_scores_and_gradients_from_hidden_states(layout):
    tensors = leaves(torch.float32)
    candidates = torch.randint(64, (16, 5), device=DEVICE) if layout == "candidates" else None
    mask = torch.rand(64, 100, device=DEVICE) < 0.7
    own = step(*tensors, candidates=candidates, documents_mask=mask)
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    rows = reference.project(exact[1].flatten(0, 1), exact[2], exact[3])
    documents = TokenBatch.from_padded(rows.view(64, 100, 128), mask)
    scores = reference.maxsim(TokenBatch.from_padded(exact[0]), documents, candidates)
    for one, other in zip(own, (scores, *torch.autograd.grad(scores.sum(), exact)), strict=True):
        assert (one - other).norm() < 1e-4 * other.norm()


def test_nothing_waits_for_the_device():
    tensors = leaves()
    step(*tensors)
    with no_waiting():
        step(*tensors)


def test_a_cuda_graph_captures_forward_and_backward():
    tensors = leaves()
    graph, results = captured(lambda: step(*tensors))
    with torch.no_grad():
        for tensor in tensors:
            tensor.copy_(torch.randn_like(tensor))
    graph.replay()
    assert all(map(torch.equal, results, step(*tensors)))


def test_memory_beyond_the_gradients():
    """Projected vectors and their gradient in bf16, parts of the weight's gradient: nothing of their size in float32."""
    hidden, weight, bias, grad = problem(200_000, 768, 128, torch.bfloat16, device=DEVICE)
    tensors = [tensor.requires_grad_() for tensor in (hidden, weight, bias)]

    def run():
        embeddings = project_normalize(*tensors)
        return torch.autograd.grad(embeddings, tensors, grad)

    run()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    extra = torch.cuda.max_memory_allocated() - before - sum(tensor.nbytes for tensor in tensors)
    assert extra < grad.nbytes + 24 * 2**20


def test_autocast():
    hidden, weight, bias, grad = (t.requires_grad_() for t in problem(3000, 768, 128, device=DEVICE))
    with torch.autocast("cuda", torch.bfloat16):
        own = project_normalize(hidden, weight, bias)
        stock = F.normalize(F.linear(hidden, weight, bias), dim=-1)
    assert own.dtype == torch.bfloat16
    assert (own - stock).norm() < 6e-3 * stock.norm()
    gradients = torch.autograd.grad(own, (hidden, weight, bias), grad.bfloat16())
    others = torch.autograd.grad(stock, (hidden, weight, bias), grad)
    for one, other in zip(gradients, others, strict=True):
        assert one.dtype == torch.float32 and (one - other).norm() < 2e-2 * other.norm()


def test_more_than_two_to_the_31_elements():
    if torch.cuda.mem_get_info()[0] < 30e9:
        pytest.skip("needs 30 GB of free GPU memory")
    rows = 3_000_000
    hidden = torch.empty(rows, 768, device=DEVICE, dtype=torch.bfloat16).normal_()
    _, weight, bias, _ = problem(1, 768, 128, torch.bfloat16, device=DEVICE)
    assert hidden.numel() > 2**31
    embeddings, inverse_norms = head.forward(hidden, weight, bias, True, "highest")
    grad = torch.zeros_like(embeddings)
    grad[-500:].normal_()
    own = head.backward(grad, hidden, weight, embeddings, inverse_norms, True, "highest", True, True, True)
    assert not own[0][:-500].any()
    tail = [tensor.detach().double().requires_grad_() for tensor in (hidden[-500:], weight, bias)]
    expected = reference.project(*tail)
    assert (embeddings[-500:] - expected).norm() < 6e-3 * expected.norm()
    gradients = torch.autograd.grad(expected, tail, grad[-500:].double())
    for one, other in zip((own[0][-500:], *own[1:]), gradients, strict=True):
        assert (one - other).norm() < 6e-3 * other.norm()
