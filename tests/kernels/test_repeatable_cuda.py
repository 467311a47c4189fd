"""Operators on a GPU: the same bits every time, without waiting and in CUDA graphs; memory, and offsets past 2^31."""

from dataclasses import replace

import pytest
import torch

from pylate_fastmaxsim import LogSumExp, TokenBatch, TopK, maxsim, pooled_scores, reference
from tests.support.on_gpu import captured, no_waiting
from tests.support.operator_checks import outcome
from tests.support.operators import FORMATS, OPERATORS, Problem, compressed_as, lengths, problem

pytest.importorskip("triton")
pytestmark = pytest.mark.cuda

CUDA = "cuda"
CASES = [
    (name, layout)
    for name in ("maxsim", "softmax 0.2", "log-sum-exp", "top 4", "top 9", "xtr 256")
    for layout in ("all", "shared")
]
CASES += [("maxsim", "own"), ("splade", "all"), ("project", "all"), ("from hidden documents", "all")]
CASES += [(format, "shared") for format in FORMATS]


@pytest.mark.parametrize("name, layout", CASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_repeatable_without_waiting_and_in_a_graph(name, layout, dtype):
    operator = name.split()[0].replace("plaid", "residual") if name in FORMATS else name
    sizes = {"queries": lengths(0, 64, 32), "documents": lengths(1, 256, 300), "dim": 128, "hidden": 768, "slots": 4}
    case = problem(
        operator, dtype=dtype, layout=layout, rows=2000, format=name if name in FORMATS else None, device=CUDA, **sizes
    )
    call = OPERATORS[operator].call
    grad = torch.randn(call(case).shape, device=CUDA)

    def run():
        return outcome(call, case, grad)

    first = run()
    with no_waiting():
        again = [run() for _ in range(10)]
    assert all(torch.equal(*pair) for results in again for pair in zip(first, results, strict=True))
    graph, replayed = captured(run)
    # Other numbers, other candidates, and shorter documents.
    for leaf in case.leaves.values():
        leaf.copy_(torch.randn(leaf.shape, device=CUDA))
    if case.candidates is not None and layout != "own":
        case.candidates.copy_(case.candidates.flip(0))
    if isinstance(case.documents, TokenBatch):
        case.documents.lengths.sub_(case.documents.lengths // 2)
    graph.replay()
    assert all(torch.equal(*pair) for pair in zip(replayed, run(), strict=True))


def test_a_training_step_never_waits_for_the_device():
    queries = torch.randn(4, 32, 64, device=CUDA, dtype=torch.bfloat16, requires_grad=True)
    documents = torch.randn(8, 100, 64, device=CUDA, dtype=torch.bfloat16, requires_grad=True)
    mask, candidates = torch.rand(8, 100, device=CUDA) < 0.7, torch.randint(0, 8, (4, 3), device=CUDA)

    def step():
        listed = maxsim(queries, documents, candidates, save_documents="int8")
        (maxsim(queries, documents, documents_mask=mask).sum() + listed.sum()).backward()

    step()  # compiles the kernels
    with no_waiting():
        step()


@pytest.mark.parametrize("name", ["softmax 0.2", "top 4"])
def test_compiled_as_one_graph(name):
    case = problem(name, queries=(32,) * 4, documents=(100,) * 6, dim=128, masked=False, gapless=True, device=CUDA)
    compiled = torch.compile(lambda leaves: OPERATORS[name].call(case.with_leaves(leaves)), fullgraph=True)
    grad = torch.randn(4, 6, device=CUDA)
    with torch.autocast(CUDA, torch.bfloat16):
        found, expected = (outcome(each, case, grad) for each in (lambda p: compiled(p.leaves), OPERATORS[name].call))
    assert all(map(torch.equal, found, expected))


def test_what_the_kernels_do_not_keep_runs_in_blocks(caplog):
    case = problem("maxsim", queries=(8,) * 3, documents=(200,) * 5, dim=32, masked=False, device=CUDA)
    scores = pooled_scores(case.queries, case.documents, pooling=TopK(100))
    exact = case.exact()
    wanted = reference.pooled_scores(exact.queries, exact.documents, pooling=TopK(100))
    torch.testing.assert_close(scores.double(), wanted, rtol=1e-5, atol=1e-4)
    assert caplog.text.count("TopK(100) is computed in blocks of PyTorch") == 1
    low = pooled_scores(case.queries, case.documents, pooling=LogSumExp(1e-4))
    torch.testing.assert_close(low, maxsim(case.queries, case.documents), rtol=1e-4, atol=1e-2)


def _peak(run) -> int:
    """Bytes beyond what was allocated before."""
    run()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    return torch.cuda.max_memory_allocated() - before


def test_documents_are_scored_where_a_model_left_them():
    """The sizes of docs/search.md#in-python, whose documents take 38 MiB: no copy of them, 16 bytes a document, 4 a score."""
    output = torch.randn(512, 300, 128, device=CUDA, dtype=torch.bfloat16)
    queries = torch.randn(256, 32, 128, device=CUDA, dtype=torch.bfloat16)
    tokens = torch.randint(5, 301, (512,), device=CUDA)

    def scores() -> torch.Tensor:
        starts = torch.arange(512, device=CUDA) * 300 + 4
        return maxsim(queries, TokenBatch(output.view(-1, 128), starts, tokens - 4, 296))

    expected = maxsim(queries, TokenBatch.from_list([row[4:n] for row, n in zip(output, tokens.tolist(), strict=True)]))
    torch.testing.assert_close(scores(), expected)
    assert _peak(scores) < 2 * 2**20


# All similarities would be 360 MiB of float32. Of a projection: projected vectors and their gradient in bf16, and parts of
# the weight's gradient, nothing of their size in float32.
MEMORY = {
    "softmax 0.2": ({"queries": (32,) * 128, "documents": (180,) * 128}, 80),
    "top 4": ({"queries": (32,) * 128, "documents": (180,) * 128}, 80),
    "project": ({"documents": (200_000,), "hidden": 768}, 2 * 49 + 24 + 293),
}


@pytest.mark.parametrize("name, options, mebibytes", [(name, *row) for name, row in MEMORY.items()])
def test_memory_is_not_that_of_the_similarities(name, options, mebibytes):
    case = problem(name, dim=128, dtype=torch.bfloat16, masked=False, gapless=True, device=CUDA, **options)
    leaves = {leaf: values.requires_grad_() for leaf, values in case.leaves.items()}
    case = case.with_leaves(leaves)

    def run():
        scores = OPERATORS[name].call(case)
        torch.autograd.grad(scores, list(leaves.values()), torch.ones_like(scores))

    assert _peak(run) < mebibytes * 2**20


def _many(count: int, length: int, dim: int) -> TokenBatch:
    return TokenBatch.from_padded(torch.empty(count, length, dim, device=CUDA, dtype=torch.bfloat16).normal_())


# Numbers of documents, or winners, that 32 bits cannot count: queries and their length, documents and theirs, d, and whether
# the last documents are candidates.
BEYOND = [(name, 3, 8, 58_500, 300, 128, False) for name in ("maxsim", "softmax 0.2", "top 4", "top 16")]
BEYOND += [("maxsim", 3, 8, 58_500, 300, 128, True)]
BEYOND += [("maxsim", 1250, 32, 60_000, 2, 16, False), ("top 64", 64, 32, 20_000, 70, 16, False)]


@pytest.mark.parametrize("name, queries, rows, documents, tokens, dim, listed", BEYOND)
def test_offsets_beyond_two_to_the_31(name, queries, rows, documents, tokens, dim, listed):
    """The last documents are scored as alone, and so are their gradients; those of others are 0."""
    if torch.cuda.mem_get_info()[0] < 60e9:
        pytest.skip("needs 60 GB of free GPU memory")
    asked, held = _many(queries, rows, dim), _many(documents, tokens, dim)
    last = TokenBatch.from_padded(held.values[-3 * tokens :].clone().view(3, tokens, dim))
    results = []
    for each in (held, last):
        candidates = (len(each) - 1 - torch.arange(3, device=CUDA)).repeat(queries, 1) if listed else None
        values = each.values.requires_grad_()
        scores = OPERATORS[name].call(Problem(asked, each.with_values(values), candidates))[:, -3:]
        results.append((scores.detach(), torch.autograd.grad(scores.sum(), values)[0]))
    (scores, gradient), (alone, own) = results
    assert torch.equal(scores, alone) and torch.equal(gradient[-3 * tokens :], own)
    assert not gradient[: -3 * tokens].any()


@pytest.mark.parametrize("format", ["int8", "fp8", "residual 4"])
def test_compressed_offsets_beyond_two_to_the_31(format):
    tokens = 2**24 + 1000
    values = torch.zeros(tokens, 128, dtype=torch.bfloat16, device=CUDA)
    values[-300:] = torch.nn.functional.normalize(torch.randn(300, 128, device=CUDA), dim=1).bfloat16()
    starts, sizes = torch.tensor([0, tokens - 300], device=CUDA), torch.tensor([300, 300], device=CUDA)
    queries = TokenBatch.from_padded(values[-32:][None].clone())
    documents = compressed_as(TokenBatch(values, starts, sizes, 300), format)
    last = compressed_as(TokenBatch.from_padded(values[-300:][None].clone()), format)
    assert torch.equal(maxsim(queries, documents)[:, 1:], maxsim(queries, last))


@pytest.mark.parametrize("name, texts, rows, dim", [("splade", 9000, 250_000, 16), ("project", 1_500_000, 128, 768)])
def test_results_and_hidden_states_beyond_two_to_the_31(name, texts, rows, dim):
    if torch.cuda.mem_get_info()[0] < 60e9:
        pytest.skip("needs 60 GB of free GPU memory")
    documents, weight = _many(texts, 2, dim), torch.randn(rows, dim, device=CUDA).bfloat16()
    last = TokenBatch.from_padded(documents.values[-6:].clone().view(3, 2, dim))
    results = []
    for each in (documents, last):
        values = each.values.requires_grad_()
        found = OPERATORS[name].call(replace(Problem(None, each.with_values(values)), weight=weight))
        found = found[-3:] if name == "splade" else found[-6:]
        results.append((found.detach(), torch.autograd.grad(found.sum(), values)[0][-6:]))
    assert all(map(torch.equal, *results))
