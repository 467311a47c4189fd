import itertools
import logging
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import pylate_fastmaxsim
from pylate_fastmaxsim.integrations import log as say_once

pytest.importorskip("pylate")

from pylate import rank, retrieve, scores  # noqa: E402

GROUPED = ("colbert_scores", "colbert_kd_scores", "ColBERTScores")
KINDS = ("bool", "int", "float", "weights")
NAMES = ("colbert_scores", "colbert_kd_scores", "colbert_scores_pairwise", "ColBERTScores")
COUNT, WAYS, QUERY_LENGTH, LENGTH, DIM = 3, 2, 4, 6, 5


def scorer(name):
    found = getattr(scores, name)
    return found() if isinstance(found, type) else found


def embeddings(name, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    grouped = name in ("colbert_kd_scores", "ColBERTScores")
    queries = torch.randn(COUNT, QUERY_LENGTH, DIM, generator=generator).to(dtype)
    documents = torch.randn(COUNT, *([WAYS] if grouped else []), LENGTH, DIM, generator=generator).to(dtype)
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


@pytest.fixture
def log(monkeypatch, caplog):
    monkeypatch.setattr(say_once, "_said", set())
    caplog.set_level(logging.INFO, "pylate_fastmaxsim")
    return caplog


def compare(name, *args, calls):
    expected = scorer(name)(*args)
    calls.clear()
    with pylate_fastmaxsim.enabled():
        result = scorer(name)(*args)
    assert len(calls) == 1
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
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
        assert scorer(name)(queries[:0], documents[:0]).shape[0] == 0


@pytest.mark.parametrize("name", GROUPED)
def test_a_mask_in_float64_makes_scores_in_float64(name, log):
    queries_mask, documents_mask = masks(name, KINDS[0])
    given = *embeddings(name), queries_mask.double(), documents_mask
    expected = scorer(name)(*given)
    pylate_fastmaxsim.enable()
    ours = scorer(name)(*given)
    assert expected.dtype == torch.float64 and torch.equal(ours, expected)
    assert "a mask is float64 and the embeddings are torch.float32" in log.text


@pytest.mark.parametrize("name", GROUPED)
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
    expected = scorer(name)(queries, filled, queries_mask=queries_mask)
    with pylate_fastmaxsim.enabled():
        result = scorer(name)(queries, documents, queries_mask=queries_mask, documents_mask=documents_mask)
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
    assert result.min() < 0


@pytest.mark.parametrize("name, kind", [("colbert_scores_pairwise", None), *itertools.product(GROUPED, KINDS)])
def test_scores_with_stock_masking_and_gradients_equal_stock(name, kind):
    given = {} if kind is None else dict(zip(("queries_mask", "documents_mask"), masks(name, kind), strict=True))

    def results():
        inputs = [tensor.requires_grad_() for tensor in embeddings(name)]
        result = scorer(name)(*inputs, **given)
        weights = torch.arange(1.0, result.numel() + 1).view_as(result)
        return result, *torch.autograd.grad((result * weights).sum(), inputs)

    expected = results()
    with pylate_fastmaxsim.enabled(stock_masking=True):
        torch.testing.assert_close(results(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_half_precision_scores_are_float32(name):
    queries, documents = embeddings(name, torch.bfloat16)
    expected = scorer(name)(queries.float(), documents.float())
    with pylate_fastmaxsim.enabled():
        result = scorer(name)(queries, documents)
    assert result.dtype == torch.float32
    torch.testing.assert_close(result, expected, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("name", GROUPED)
@pytest.mark.parametrize("start", [0.0, 0.5])
def test_weights_of_query_tokens_that_are_learned(name, start):
    queries, documents = embeddings(name)
    weights = torch.full(queries.shape[:2], start, requires_grad=True)

    def gradient():
        (of_weights,) = torch.autograd.grad(scorer(name)(queries, documents, queries_mask=weights).sum(), weights)
        return of_weights

    expected = gradient()
    assert expected.abs().max() > 0
    with pylate_fastmaxsim.enabled():
        torch.testing.assert_close(gradient(), expected)


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
def test_a_backend_asked_for_is_honoured(name, calls, log, monkeypatch):
    inputs = embeddings(name)
    with pylate_fastmaxsim.enabled():
        scorer(name)(*inputs, backend="torch")
        scorer(name)(*inputs, backend="torch")
        assert log.text.count("backend='torch'") == 1 + (name == "ColBERTScores")
        monkeypatch.setenv("PYLATE_SCORES_BACKEND", "torch")
        scorer(name)(*inputs)
        rank.rerank(**candidates())
        assert log.text.count("PYLATE_SCORES_BACKEND=torch") >= 2 and not calls
        scorer(name)(*inputs, backend="auto")
        assert len(calls) == 1
        with pytest.raises(ValueError, match="backend must be one of"):
            scorer(name)(*inputs, backend="fastest")


@pytest.mark.parametrize("name", NAMES)
def test_mixed_dtypes_stay_an_error_and_unknown_ones_run_stock(name, calls, log):
    queries, documents = embeddings(name)
    whole = [tensor.round().long() for tensor in (queries, documents)]
    expected = scorer(name)(*whole)
    with pylate_fastmaxsim.enabled():
        with pytest.raises(RuntimeError):
            scorer(name)(queries, documents.to(torch.bfloat16))
        assert "is not accelerated" not in log.text
        assert torch.equal(scorer(name)(*whole), expected)
    assert not calls
    assert "torch.int64" in log.text


@pytest.mark.parametrize("name", GROUPED)
@pytest.mark.parametrize("masked, length", [("queries", QUERY_LENGTH), ("documents", LENGTH)])
def test_several_masks_of_one_sequence(name, masked, length):
    queries, documents = (tensor[:1] for tensor in embeddings(name))
    without_one = ~torch.eye(length, dtype=torch.bool)
    if masked == "documents" and documents.dim() == 4:
        without_one = without_one[:, None].expand(-1, WAYS, -1)
    mask = {f"{masked}_mask": without_one}
    expected = scorer(name)(queries, documents, **mask)
    assert expected.numel() > documents.shape[:-2].numel()
    with pylate_fastmaxsim.enabled(stock_masking=True):
        assert torch.equal(scorer(name)(queries, documents, **mask), expected)


@pytest.mark.parametrize("name", NAMES)
def test_scores_in_one_graph(name, calls):
    function = scorer(name)
    expected = function(*embeddings(name))
    with pylate_fastmaxsim.enabled():
        compiled = torch.compile(lambda *args: function(*args), fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(*embeddings(name)), expected)
    assert calls


def candidates(convert=lambda tensor: tensor):
    generator = torch.Generator().manual_seed(2)
    lengths = ((3, 5, 1), (4, 2))
    documents = [[torch.randn(length, DIM, generator=generator) for length in group] for group in lengths]
    return {
        "documents_ids": [["a", "b", "c"], [1, 2]],
        "queries_embeddings": [convert(torch.randn(QUERY_LENGTH, DIM, generator=generator)) for _ in documents],
        "documents_embeddings": [[convert(document) for document in group] for group in documents],
    }


@pytest.mark.parametrize(
    "convert, change",
    [
        (lambda tensor: tensor, {"device": None}),
        (lambda tensor: tensor.numpy(), {"device": "cpu"}),
        (lambda tensor: tensor.tolist(), {}),
        (lambda tensor: (50 * tensor).to(torch.int8), {}),
        (lambda tensor: tensor, {"documents_ids": iter, "queries_embeddings": iter, "documents_embeddings": iter}),
        (lambda tensor: tensor, {"queries_embeddings": lambda queries: queries[0]}),
    ],
    ids=["tensors", "arrays", "lists", "int8", "generators", "one query"],
)
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


def test_retrieval_reranks_with_it(calls):
    retriever = retrieve.ColBERT.__new__(retrieve.ColBERT)
    documents = [[torch.randn(3, DIM)], [torch.randn(3, DIM) for _ in "ba"]]
    retriever.index = SimpleNamespace(get_documents_embeddings=lambda ids: documents)
    with pylate_fastmaxsim.enabled():
        hits = {"documents_ids": [[["a"], ["b", "a"]]]}
        result = retriever._score_batch([torch.randn(QUERY_LENGTH, DIM)], hits, k=1, device="cpu")
    assert len(calls) == len(result[0]) == 1


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
        assert {hit["id"]: hit["score"] for hit in hits} == pytest.approx(
            {hit["id"]: hit["score"] for hit in expected}, abs=5e-2
        )
