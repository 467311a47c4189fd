"""PyLate's scores, XTR among them, and reranking: the values and gradients of stock, in any form it takes."""

import itertools

import numpy as np
import pytest
import torch
from pylate import rank, scores
from pylate.scores import XTRKDScores, XTRScores

import pylate_fastmaxsim
from pylate_fastmaxsim.integrations.pylate import scores as pylate_scores
from tests.support.hosts import operators

SCORERS = {
    "colbert_scores": scores.colbert_scores,
    "colbert_kd_scores": scores.colbert_kd_scores,
    "colbert_scores_pairwise": scores.colbert_scores_pairwise,
    "ColBERTScores": scores.ColBERTScores(),
}
NAMES = tuple(SCORERS)
MASKED = "colbert_scores", "colbert_kd_scores", "ColBERTScores"
SCORERS |= {"XTR 1": XTRScores(1), "XTR 9 in chunks": XTRScores(9, document_chunk_size=2), "XTR 24": XTRScores(24)}
SCORERS |= {"XTR of own documents": XTRKDScores(9)}
KINDS = ("bool", "int", "float", "weights")
COUNT, WAYS, QUERY_LENGTH, LENGTH, DIM = 3, 2, 4, 6, 5


@pytest.fixture
def calls(monkeypatch) -> list:
    return operators((pylate_scores, "maxsim"), (pylate_scores, "xtr_scores"))(None, monkeypatch)


def embeddings(name, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    groups = [] if name in ("colbert_scores", "colbert_scores_pairwise") else [WAYS]
    queries = torch.randn(COUNT, QUERY_LENGTH, DIM, generator=generator).to(dtype)
    documents = torch.randn(COUNT, *groups, LENGTH, DIM, generator=generator).to(dtype)
    return queries, documents


def masks(name, kind):
    """Masks of any pattern; the first document has no live token, the last has no masked one."""
    generator = torch.Generator().manual_seed(1)
    queries, documents = (torch.rand(tensor.shape[:-1], generator=generator) for tensor in embeddings(name))
    documents.flatten(0, -2)[0] = 0.0
    documents.flatten(0, -2)[-1] = 1.0
    queries, documents = queries * (queries > 0.4), documents * (documents > 0.4)
    if kind == "weights":
        return queries, documents
    dtype = {"bool": torch.bool, "int": torch.int64, "float": torch.float32}[kind]
    return (queries != 0).to(dtype), (documents != 0).to(dtype)


def compare(name, *args, calls):
    expected = SCORERS[name](*args)
    calls.clear()
    with pylate_fastmaxsim.enabled():
        result = SCORERS[name](*args)
    assert len(calls) == 1
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", SCORERS)
def test_scores_equal_stock(name, calls):
    converters = [
        lambda tensor: tensor,
        lambda tensor: tensor.double(),
        lambda tensor: tensor.numpy(),
        list,
        lambda tensor: list(tensor.numpy()),
        lambda tensor: tensor.tolist(),
        lambda tensor: tensor.transpose(0, 1).contiguous().transpose(0, 1),
    ]
    for convert in converters:
        compare(name, *map(convert, embeddings(name)), calls=calls)
    queries, documents = embeddings(name)
    with pylate_fastmaxsim.enabled():
        if name in NAMES:
            assert SCORERS[name](queries[:0], documents[:0]).shape[0] == 0
        compiled = torch.compile(lambda *args: SCORERS[name](*args), fullgraph=True, backend="eager")
        calls.clear()
        torch.testing.assert_close(compiled(queries, documents), SCORERS[name](queries, documents))
        assert len(calls) == 2


def test_xtr_scores_that_are_compiled_by_their_user_and_the_default_instances(calls):
    """Of arrays in double precision; the default instances take 256 tokens."""
    generator = torch.Generator().manual_seed(0)
    shapes = (COUNT, QUERY_LENGTH, DIM), (COUNT, WAYS, 60, DIM)
    inputs = [torch.randn(*shape, generator=generator, dtype=torch.float64).numpy() for shape in shapes]
    compiled = XTRScores(k=5)
    metrics = compiled, scores.xtr_scores, scores.xtr_kd_scores
    expected = [metric(*inputs) for metric in metrics]
    compiled.compile(backend="eager")
    with pylate_fastmaxsim.enabled():
        torch.testing.assert_close([metric(*inputs) for metric in metrics], expected, rtol=1e-6, atol=1e-6)
    assert len(calls) == 3


@pytest.mark.parametrize("name", MASKED)
@pytest.mark.parametrize("kind", KINDS[:3])
def test_a_masked_document_token_never_wins(name, kind):
    queries_mask, documents_mask = masks(name, kind)
    queries, documents = embeddings(name)
    queries, documents = queries.abs(), -documents.abs()
    # Stock agrees where the masked tokens repeat a live one instead; document 0 has none and scores 0.
    live = documents_mask.to(torch.bool)
    first_live = live.int().argmax(dim=-1)[..., None, None].expand(*documents.shape[:-2], 1, DIM)
    filled = torch.where(live[..., None], documents, documents.gather(-2, first_live))
    filled.flatten(0, -3)[0] = 0.0
    expected = SCORERS[name](queries, filled, queries_mask=queries_mask)
    with pylate_fastmaxsim.enabled():
        result = SCORERS[name](queries, documents, queries_mask=queries_mask, documents_mask=documents_mask)
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
    assert result.min() < 0


@pytest.mark.parametrize(
    "name, kind",
    [
        ("colbert_scores_pairwise", None),
        *itertools.product(MASKED, KINDS),
        *itertools.product(sorted(SCORERS.keys() - NAMES), (None, "bool", "float")),
    ],
)
def test_scores_with_stock_masking_and_gradients_equal_stock(name, kind):
    given = {} if kind is None else dict(zip(("queries_mask", "documents_mask"), masks(name, kind), strict=True))

    def results():
        inputs = [tensor.requires_grad_() for tensor in embeddings(name)]
        result = SCORERS[name](*inputs, **given)
        weights = torch.arange(1.0, result.numel() + 1).view_as(result)
        return result, *torch.autograd.grad((result * weights).sum(), inputs)

    expected = results()
    with pylate_fastmaxsim.enabled(stock_masking=True):
        torch.testing.assert_close(results(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_half_precision_scores_are_float32(name):
    queries, documents = embeddings(name, torch.bfloat16)
    expected = SCORERS[name](queries.float(), documents.float())
    with pylate_fastmaxsim.enabled():
        result = SCORERS[name](queries, documents)
    assert result.dtype == torch.float32
    torch.testing.assert_close(result, expected, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("name", [*MASKED, "XTR 9 in chunks"])
@pytest.mark.parametrize("start", [0.0, 0.5])
def test_weights_of_query_tokens_that_are_learned(name, start, calls):
    """With XTR stock chooses tokens before it weighs them, and runs."""
    queries, documents = embeddings(name)
    weights = torch.full(queries.shape[:2], start, requires_grad=True)

    def gradient():
        return torch.autograd.grad(SCORERS[name](queries, documents, queries_mask=weights).sum(), weights)[0]

    expected = gradient()
    assert expected.abs().max() > 0
    with pylate_fastmaxsim.enabled():
        torch.testing.assert_close(gradient(), expected)
    assert bool(calls) == (name in MASKED)


def test_pairwise_takes_ragged_lists_and_stops_with_the_shorter(calls):
    queries = [torch.randn(length, DIM) for length in (4, 2, 3)]
    documents = [np.random.default_rng(0).normal(size=(length, DIM)).astype(np.float32) for length in (1, 5, 3, 2)]
    compare("colbert_scores_pairwise", queries, documents, calls=calls)


def test_zero_padding_without_a_mask_competes_as_in_stock(calls):
    queries, documents = embeddings("colbert_scores")
    queries, documents = queries.abs(), -documents.abs()
    documents[0, 3:] = 0.0
    compare("colbert_scores", queries, documents, calls=calls)


@pytest.mark.parametrize("name", NAMES)
def test_a_backend_asked_for_is_honoured(name, calls, caplog, monkeypatch):
    inputs = embeddings(name)
    with pylate_fastmaxsim.enabled():
        SCORERS[name](*inputs, backend="torch")
        SCORERS[name](*inputs, backend="torch")
        assert caplog.text.count("backend='torch'") == 1 + (name == "ColBERTScores")
        monkeypatch.setenv("PYLATE_SCORES_BACKEND", "torch")
        SCORERS[name](*inputs)
        rank.rerank(**candidates())
        assert caplog.text.count("PYLATE_SCORES_BACKEND=torch") >= 2 and not calls
        SCORERS[name](*inputs, backend="auto")
        assert len(calls) == 1
        with pytest.raises(ValueError, match="backend must be one of"):
            SCORERS[name](*inputs, backend="fastest")


def candidates(convert=lambda tensor: tensor):
    generator = torch.Generator().manual_seed(2)
    lengths = ((3, 5, 1), (4, 2))
    documents = [[torch.randn(length, DIM, generator=generator) for length in group] for group in lengths]
    return {
        "documents_ids": [["a", "b", "c"], [1, 2]],
        "queries_embeddings": [convert(torch.randn(QUERY_LENGTH, DIM, generator=generator)) for _ in documents],
        "documents_embeddings": [[convert(document) for document in group] for group in documents],
    }


RERANKED = {
    "tensors": (lambda tensor: tensor, {"device": None}),
    "arrays": (lambda tensor: tensor.numpy(), {"device": "cpu"}),
    "lists": (lambda tensor: tensor.tolist(), {}),
    "int8": (lambda tensor: (50 * tensor).to(torch.int8), {}),
    "generators": (lambda x: x, dict.fromkeys(("documents_ids", "queries_embeddings", "documents_embeddings"), iter)),
    "one query": (lambda tensor: tensor, {"queries_embeddings": lambda queries: queries[0]}),
    # Stock pads all but the longest with zeros, whose score of 0 is then the best.
    "negative": (lambda x: torch.full_like(x, -1.0), {"queries_embeddings": lambda queries: [-queries[0]] * 2}),
}


@pytest.mark.parametrize("convert, change", RERANKED.values(), ids=RERANKED)
def test_rerank_with_stock_masking_equals_stock(convert, change):
    def results():
        given = candidates(convert)
        return rank.rerank(**given | {k: v(given[k]) if callable(v) else v for k, v in change.items()})

    expected = results()
    with pylate_fastmaxsim.enabled(stock_masking=True):
        ours = results()
    assert [[hit["id"] for hit in hits] for hits in ours] == [[hit["id"] for hit in hits] for hits in expected]
    scored = [[hit["score"] for hits in each for hit in hits] for each in (ours, expected)]
    assert scored[0] == pytest.approx(scored[1], abs=1e-5) and list(map(type, scored[0])) == list(map(type, scored[1]))


def test_rerank_lets_no_padding_compete():
    arguments = {
        "documents_ids": [["short", "long", "none"]],
        "queries_embeddings": torch.tensor([[1.0, 0.0]]),
        "documents_embeddings": [[torch.tensor([[-2.0, 0.0]]), torch.tensor([[-1.0, 0.0], [-3.0, 0.0]])]],
    }
    assert [hit["id"] for hit in rank.rerank(**arguments)[0]] == ["short", "long"]
    with pylate_fastmaxsim.enabled():
        assert rank.rerank(**arguments)[0] == [{"id": "long", "score": -1.0}, {"id": "short", "score": -2.0}]
        assert rank.rerank([[]], arguments["queries_embeddings"], [[]]) == [[]]


@pytest.mark.parametrize("dtype, listed", [(torch.bfloat16, torch.float16), (torch.float16, torch.float32)], ids=str)
def test_autocast_takes_lists_of_any_dtype(dtype, listed, calls):
    arguments = candidates(lambda tensor: tensor.to(listed))
    first, *others = arguments["documents_embeddings"][0]
    exact = rank.rerank(**candidates(lambda tensor: tensor.to(listed).float()))
    pairs = scores.colbert_scores_pairwise([first.float()] * 2, [other.float() for other in others])
    with pylate_fastmaxsim.enabled(stock_masking=True), torch.autocast("cpu", dtype):
        reranked = rank.rerank(**arguments)
        pairwise = scores.colbert_scores_pairwise([first] * 2, others)
    assert len(calls) == 3
    torch.testing.assert_close(pairwise, pairs, rtol=2e-2, atol=2e-2)
    for hits, expected in zip(reranked, exact, strict=True):
        own, other = ({hit["id"]: hit["score"] for hit in each} for each in (hits, expected))
        assert own == pytest.approx(other, abs=5e-2)


def test_xtr_scores_at_their_edges():
    """All tokens pass where k is their number, NaN takes a place, and nothing is positive."""
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(*shape, generator=generator) for shape in ((3, 4, 2), (3, 2, 2, 2))]
    queries, documents = (torch.nn.functional.normalize(each, dim=-1) for each in drawn)
    stock = XTRScores(k=12)(queries, documents)
    assert (stock < 0).any(), "documents whose tokens are all negative must take part"
    for k in (12, 13, 1000):
        torch.testing.assert_close(pylate_fastmaxsim.xtr_scores(queries, documents.flatten(0, 1), k), stock)
    spoilt = documents.clone()
    spoilt[1, 0, 1] = torch.nan
    for q, d in ((queries, spoilt), (queries[:1].abs(), -documents[:1].abs())):
        ours = pylate_fastmaxsim.xtr_scores(q, d.flatten(0, 1), 4)
        torch.testing.assert_close(ours, XTRScores(k=4)(q, d), equal_nan=True)
