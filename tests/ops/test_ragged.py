"""Batches as they come: layouts, what is not finite, blocks of the CPU path, memory, and winners of long documents."""

from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pylate_fastmaxsim import TokenBatch, TopK, maxsim, pooled_scores
from pylate_fastmaxsim.cpu import compressed as blocked_compressed
from pylate_fastmaxsim.cpu import maxsim as blocked
from pylate_fastmaxsim.cpu import projection as blocked_projection
from pylate_fastmaxsim.cpu import splade as blocked_splade
from pylate_fastmaxsim.cpu import xtr as blocked_xtr
from pylate_fastmaxsim.ops.projection import project_normalize
from tests.support.operator_checks import (
    check,
    check_nan,
    check_nan_in_splade,
    check_rows_without_a_gradient,
    outcome,
    random_gradient,
)
from tests.support.operators import OPERATORS, problem
from tests.support.ragged_batches import batches

BLOCKS = {
    blocked: ("BLOCK_ELEMENTS", "SLAB_ELEMENTS", "FEW_ELEMENTS", "WINNER_ELEMENTS"),
    blocked_compressed: ("DECOMPRESSED_ELEMENTS",),
    blocked_projection: ("ROWS",),
    blocked_splade: ("ROWS",),
    blocked_xtr: ("BLOCK_TOKENS", "BLOCK_TOKENS_OF_K", "BLOCK_ELEMENTS"),
}


@pytest.mark.parametrize("name", ["maxsim", "top 3", "softmax 0.2", "xtr 12", "residual", "int8", "splade", "project"])
@pytest.mark.parametrize("size", [1, 40])
def test_block_sizes_do_not_matter(name, size, monkeypatch):
    for module, constants in BLOCKS.items():
        for constant in constants:
            monkeypatch.setattr(module, constant, size)
    for layout in ("all", "shared"):
        check(name, problem(name, layout=layout, dtype=torch.float64, rows=9))


@pytest.mark.parametrize("name", ["maxsim", "top 3", "softmax 0.2", "xtr 5"])
def test_layout_does_not_matter(name):
    case = problem(name, layout="shared")
    padded = {side: TokenBatch.from_padded(*batch.to_padded()) for side, batch in case.batches.items()}
    scores = OPERATORS[name].call(case)
    assert torch.equal(OPERATORS[name].call(type(case)(**padded, candidates=case.candidates)), scores)
    if name == "maxsim":
        (q, q_mask), (d, d_mask) = case.queries.to_padded(), case.documents.to_padded()
        masks = {"queries_mask": q_mask, "documents_mask": d_mask.to(torch.int64)}
        assert torch.equal(maxsim(q, d, case.candidates, **masks), scores)


Q, D, LENGTHS = torch.randn(2, 3, 4), torch.randn(6, 5, 4, requires_grad=True), torch.tensor([5, 0, 1, 4, 2, 3])
D_OWN = D.view(2, 3, 5, 4)
OWN, KEEP = torch.arange(6).view(2, 3), torch.arange(5) < LENGTHS[:, None]
JAGGED = torch.nested.nested_tensor_from_jagged(D.flatten(0, 1), torch.tensor([0, 7, 9, 30]), torch.tensor([3, 0, 21]))


# What other kernels and PyLate take, and what it means.
TAKEN = [
    (lambda: maxsim(Q[0], D), lambda: maxsim(Q[:1], D)[0]),
    (lambda: maxsim(Q[0].numpy(), D, OWN[0], queries_mask=KEEP[0, :3]), lambda: maxsim(Q[:1], D, OWN[:1], queries_mask=KEEP[:1, :3])[0]),
    (lambda: maxsim(Q, D, documents_mask=LENGTHS), lambda: maxsim(Q, D, documents_mask=KEEP)),
    (lambda: maxsim(Q, D, queries_mask=LENGTHS[1:3].int()), lambda: maxsim(Q, D, queries_mask=KEEP[1:3, :3])),
    (lambda: maxsim(Q, D_OWN), lambda: pytest.importorskip("pylate.scores").colbert_kd_scores(Q, D_OWN, backend="torch")),
    (lambda: maxsim(Q, D_OWN, documents_mask=KEEP.view(2, 3, 5)), lambda: maxsim(Q, D, OWN, documents_mask=KEEP)),
    (lambda: maxsim(Q, D_OWN, documents_mask=LENGTHS.view(2, 3)), lambda: maxsim(Q, D, OWN, documents_mask=KEEP)),
    (lambda: pooled_scores(Q, D_OWN, pooling=TopK(2)), lambda: pooled_scores(Q, D, OWN, pooling=TopK(2))),
    (lambda: maxsim(Q, JAGGED), lambda: maxsim(Q, [D[0, :3], D[0, :0], D.flatten(0, 1)[9:]])),
]  # fmt: skip


@pytest.mark.parametrize(("taken", "meaning"), TAKEN)
def test_what_others_take_has_their_meaning(taken, meaning):
    scores, expected = taken(), meaning()
    torch.testing.assert_close(scores, expected)
    torch.testing.assert_close(*(torch.autograd.grad(each.sum(), D, retain_graph=True) for each in (scores, expected)))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("layout", ["all", "shared", "own"])
@pytest.mark.parametrize("name", ["maxsim", "top 2"])
def test_a_pair_of_gradient_zero_adds_nothing_that_is_not_finite(name, layout, bad):
    case = problem(name, queries=(3, 4), documents=(6, 5, 4, 3), masked=False, layout=layout)
    check(name, case, poisoned=True)
    case.queries.values.nan_to_num_(nan=bad)
    # NaN is not 0, and a GradScaler has to see it.
    grad = torch.full(OPERATORS[name].call(case).shape, torch.nan)
    assert all(each.isnan().any() for each in outcome(OPERATORS[name].call, case, grad)[1:])


@pytest.mark.parametrize("name", ["maxsim", "top 2", "softmax 0.2", "log-sum-exp", "xtr 5", "xtr 5, retrieved"])
def test_nan_in_a_live_token_shows_where_it_is_used(name):
    check_nan(name)


@pytest.mark.parametrize("few", [0, blocked.FEW_ELEMENTS], ids=["one by one", "many at once"])
@pytest.mark.parametrize("name", ["maxsim", "xtr 1", "xtr 12", "xtr 5, retrieved", "xtr 100"])
@pytest.mark.parametrize("layout", ["all", "shared"])
def test_what_is_not_finite_wins_as_in_the_definition(name, layout, few, monkeypatch):
    """The first NaN of a document, and -infinity where there is nothing better; masked tokens never."""
    monkeypatch.setattr(blocked, "FEW_ELEMENTS", few)
    numbers = torch.tensor([torch.nan, torch.inf, -torch.inf, -torch.inf, -1.0, 1.0, 2.0], dtype=torch.float64)
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        sizes = {"dim": 1, "dtype": torch.float64, "documents": (7, 0, 2, 3, 9, 1)}
        case = problem(name, seed, layout=layout, floor=seed % 2 == 1, **sizes)
        some = torch.randint(2, len(numbers), case.documents.values.shape, generator=generator)
        some[torch.rand(some.shape, generator=generator) < 0.1] -= 2
        case = case.with_leaves({"queries": case.queries.values.sign(), "documents": numbers[some]})
        grad = torch.randint(1, 100, (5, 6 if layout == "all" else 2), generator=generator).double()
        operator = OPERATORS[name]
        # Gradients of documents are of queries, and say who won.
        found, expected = (outcome(each, case, grad, "documents") for each in (operator.call, operator.definition))
        won = [[each.nan_to_num(nan=0.5, posinf=1e9, neginf=-1e9) for each in pair] for pair in (found, expected)]
        torch.testing.assert_close(*won)


@pytest.mark.parametrize("where", ["documents", "weight", "bias"])
def test_nan_in_splade_shows_in_what_uses_it(where):
    check_nan_in_splade("splade", where)


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", ["int8", "fp8", "residual"])
def test_a_query_token_that_is_not_finite_is_in_the_scores_of_compressed_documents(name, number):
    case = problem(name, masked=False)
    expected = OPERATORS[name].call(case)
    case.queries.values[case.queries.starts[2], 4] = number
    scores, live = OPERATORS[name].call(case), case.documents.lengths > 0
    if name == "residual" and number == torch.inf:
        assert not scores[2][live].isfinite().any()
    else:
        assert torch.equal(scores[2].isnan(), live)
    assert not scores[2][~live].any()
    others = torch.tensor([0, 1, 3, 4])
    assert torch.equal(scores[others], expected[others])


@pytest.mark.parametrize("length", [255, 256, 32767, 32768])
def test_the_last_token_of_a_long_document_can_win(length):
    documents = torch.zeros(1, length, 1)
    documents[0, -1] = 1
    documents.requires_grad_()
    maxsim(torch.ones(1, 1, 1), documents).sum().backward()
    assert documents.grad.nonzero().tolist() == [[0, length - 1, 0]]


@pytest.mark.parametrize("shape", [(0,), (3, 0), (2, 3, 0), (0, 5), (2, 3, 2, 6), (6,)])
def test_a_projection_takes_any_leading_dimensions_and_nothing(shape):
    hidden, bias = torch.ones(shape, requires_grad=True), torch.tensor([3.0, 4.0], requires_grad=True)
    weight = torch.ones(2, shape[-1], requires_grad=True)
    linear = torch.nn.functional.linear(hidden, weight, bias)
    results = project_normalize(hidden, weight, bias), torch.nn.functional.normalize(linear, dim=-1)
    torch.testing.assert_close(*results)
    torch.testing.assert_close(*(torch.autograd.grad(each.square().sum(), (hidden, weight, bias)) for each in results))


def test_projected_rows_without_a_gradient_are_not_read():
    check_rows_without_a_gradient(problem("project", documents=(40,), masked=False, gapless=True))


class LargestTensor(TorchDispatchMode):
    bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        sizes = [leaf.untyped_storage().nbytes() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.bytes = max([self.bytes, *sizes])
        return result


@pytest.mark.parametrize("layout, columns", [("all", 160), ("own", 5)])
def test_no_similarity_tensor_is_held(layout, columns):
    sizes = {"queries": (32,) * 24, "documents": (150, 40, 60, 1000) * 40, "dim": 2}
    case = problem("maxsim", masked=False, layout=layout, slots=5, **sizes)
    with LargestTensor() as largest:
        outcome(OPERATORS["maxsim"].call, case, torch.ones(24, columns))
    assert largest.bytes <= 4 * blocked.BLOCK_ELEMENTS + 8 * blocked.WINNER_ELEMENTS < 4 * 24 * 32 * 160 * 1000 / 10


@pytest.mark.parametrize("name", ["int8", "residual"])
def test_not_all_documents_are_decompressed_at_once(name, monkeypatch):
    monkeypatch.setattr(blocked, "BLOCK_ELEMENTS", 1 << 14)
    monkeypatch.setattr(blocked_compressed, "DECOMPRESSED_ELEMENTS", 1 << 14)
    case = problem(name, masked=False, queries=(8,) * 3, documents=(50,) * 200, dim=64)
    with LargestTensor() as largest:
        outcome(OPERATORS[name].call, case, torch.ones(3, 200))
    assert largest.bytes < case.documents.decompress().values.nbytes / 3


def _saved(call) -> list[tuple[torch.Size, torch.dtype]]:
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append((x.shape, x.dtype)) or x, lambda x: x):
        call()
    return kept


def test_what_a_backward_keeps():
    """SPLADE no logits, and MaxSim with saved documents these in int8 alone."""
    case = problem("splade")
    leaves = {name: leaf.requires_grad_() for name, leaf in case.leaves.items()}
    kept = _saved(lambda: OPERATORS["splade"].call(case.with_leaves(leaves)))
    assert ((6, 70), torch.uint8) in kept and max(shape.numel() for shape, _ in kept) < len(case.documents.values) * 70
    queries, documents = batches(masked=False)
    q, d = (batch.with_values(batch.values.requires_grad_()) for batch in (queries, documents))
    kept = _saved(lambda: maxsim(q, d, save_documents="int8"))
    assert (d.values.shape, torch.int8) in kept and (d.values.shape, torch.float32) not in kept


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_documents_saved_in_int8_change_the_gradient_of_queries_alone(device, compiled):
    more = {"dim": 128, "dtype": torch.bfloat16} if device == "cuda" else {}
    case = problem("maxsim", masked=False, device=device, **more)

    def run(case, save=None) -> Tensor:
        return maxsim(case.queries, case.documents, save_documents=save)

    saving = torch.compile(run, backend="aot_eager", fullgraph=True) if compiled else run
    grad = random_gradient(case, torch.Size((5, 6)))
    scores, grad_q, grad_d = outcome(run, case, grad)
    own_scores, own_q, own_d = outcome(lambda each: saving(each, "int8"), case, grad)
    assert torch.equal(own_scores, scores) and torch.equal(own_d, grad_d)
    assert 0 < (own_q - grad_q).norm() < 1e-2 * grad_q.norm()


def test_winners_are_computed_only_for_a_gradient():
    queries, documents = batches()
    learned = documents.with_values(documents.values.clone().requires_grad_())
    with mock.patch.object(blocked, "forward", wraps=blocked.forward) as forward:
        with torch.no_grad():
            maxsim(queries, learned)
        maxsim(queries, learned)
        torch.compile(maxsim, backend="eager", fullgraph=True)(queries, documents)
    assert [call.args[1] for call in forward.call_args_list] == [False, True, False]


@pytest.mark.cuda
@pytest.mark.parametrize("layout", ["all", "shared"])
@pytest.mark.parametrize("name", ["maxsim", "top 64", "softmax 1.0", "log-sum-exp"])
def test_float64_on_a_gpu_is_the_definition_and_repeatable(name, layout):
    case = problem(name, dtype=torch.float64, layout=layout).to("cuda")
    check(name, case)
    grad = random_gradient(case, OPERATORS[name].call(case).shape)
    assert all(map(torch.equal, *(outcome(OPERATORS[name].call, case, grad) for _ in range(2))))
