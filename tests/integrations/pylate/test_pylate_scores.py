import doctest
import logging

import numpy as np
import pytest
import torch

import pylate_fastmaxsim
from pylate_fastmaxsim.integrations import log as say_once

pytest.importorskip("pylate")

from pylate import rank, retrieve, scores  # noqa: E402

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


def compare(name, *args, calls, stock_masking=False, **kwargs):
    expected = scorer(name)(*args, **kwargs)
    with pylate_fastmaxsim.enabled(stock_masking=stock_masking):
        result = scorer(name)(*args, **kwargs)
    assert len(calls) == 1
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scores_equal_stock(name, dtype, calls):
    compare(name, *embeddings(name, dtype), calls=calls)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "convert",
    [
        lambda tensor: tensor.numpy(),
        lambda tensor: list(tensor),
        lambda tensor: list(tensor.numpy()),
        lambda tensor: tensor.tolist(),
        lambda tensor: tensor.transpose(0, 1).contiguous().transpose(0, 1),
    ],
    ids=["numpy", "list of tensors", "list of arrays", "nested list", "non-contiguous"],
)
def test_every_kind_of_input_is_accepted(name, convert, calls):
    compare(name, *map(convert, embeddings(name)), calls=calls)


@pytest.mark.parametrize("name", ["colbert_scores", "colbert_kd_scores", "ColBERTScores"])
@pytest.mark.parametrize("kind", ["bool", "int", "float", "weights"])
def test_masks_with_stock_masking_equal_stock(name, kind, calls):
    queries_mask, documents_mask = masks(name, kind)
    compare(
        name,
        *embeddings(name),
        queries_mask=queries_mask,
        documents_mask=documents_mask,
        stock_masking=True,
        calls=calls,
    )


@pytest.mark.parametrize("name", ["colbert_scores", "colbert_kd_scores", "ColBERTScores"])
@pytest.mark.parametrize("kind", ["bool", "int", "float"])
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


@pytest.mark.parametrize("name", NAMES)
def test_gradients_equal_stock(name):
    kinds = (
        {}
        if name == "colbert_scores_pairwise"
        else dict(zip(("queries_mask", "documents_mask"), masks(name, "bool"), strict=True))
    )

    def gradients():
        inputs = [tensor.requires_grad_() for tensor in embeddings(name)]
        result = scorer(name)(*inputs, **kinds)
        weights = torch.arange(1.0, result.numel() + 1).view_as(result)
        return torch.autograd.grad((result * weights).sum(), inputs)

    expected = gradients()
    with pylate_fastmaxsim.enabled(stock_masking=True):
        result = gradients()
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_half_precision_scores_are_float32(name):
    queries, documents = embeddings(name, torch.bfloat16)
    expected = scorer(name)(queries.float(), documents.float())
    with pylate_fastmaxsim.enabled():
        result = scorer(name)(queries, documents)
    assert result.dtype == torch.float32
    torch.testing.assert_close(result, expected, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("name", ["colbert_scores", "colbert_kd_scores", "ColBERTScores"])
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


@pytest.mark.parametrize("name", ["colbert_scores", "colbert_kd_scores", "ColBERTScores"])
def test_empty_input_gives_empty_scores(name):
    queries, documents = embeddings(name)
    with pylate_fastmaxsim.enabled():
        result = scorer(name)(queries[:0], documents[:0])
    assert result.shape[0] == 0


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
        assert "PYLATE_SCORES_BACKEND=torch" in log.text
        assert not calls
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


@pytest.mark.parametrize("name", ["colbert_scores", "colbert_kd_scores", "ColBERTScores"])
@pytest.mark.parametrize("masked", ["queries", "documents"])
def test_several_masks_of_one_sequence(name, masked):
    queries, documents = (tensor[:1] for tensor in embeddings(name))
    length = QUERY_LENGTH if masked == "queries" else LENGTH
    without_one = ~torch.eye(length, dtype=torch.bool)
    if masked == "documents" and documents.dim() == 4:
        without_one = without_one[:, None].expand(-1, WAYS, -1)
    mask = {f"{masked}_mask": without_one}
    expected = scorer(name)(queries, documents, **mask)
    assert expected.numel() > len(queries) * documents.shape[:-2].numel()
    with pylate_fastmaxsim.enabled(stock_masking=True):
        assert torch.equal(scorer(name)(queries, documents, **mask), expected)


@pytest.mark.parametrize("mask", [torch.tensor(True), torch.arange(LENGTH) < 3, [1.0] * LENGTH], ids=["0", "1", "list"])
def test_masks_of_fewer_dimensions_mean_what_they_mean_to_stock(mask):
    queries, documents = embeddings("colbert_scores")

    def outcome():
        try:
            return scores.colbert_scores(queries[:, :1], documents, documents_mask=mask)
        except Exception as error:
            return repr(error)

    expected = outcome()
    with pylate_fastmaxsim.enabled(stock_masking=True):
        result = outcome()
    assert torch.equal(result, expected) if isinstance(expected, torch.Tensor) else result == expected


@pytest.mark.parametrize("name", NAMES)
def test_scores_in_one_graph(name, calls):
    function = scorer(name)
    expected = function(*embeddings(name))
    with pylate_fastmaxsim.enabled():
        compiled = torch.compile(lambda *args: function(*args), fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(*embeddings(name)), expected)
    assert calls


@pytest.mark.parametrize("name", NAMES[:3])
def test_the_examples_of_stock_hold(name):
    with pylate_fastmaxsim.enabled():
        function = scorer(name)
        runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
        for example in doctest.DocTestFinder().find(function, name, module=False, globs={name: function}):
            runner.run(example)
    assert runner.tries > 0
    assert runner.failures == 0


def candidates(convert=lambda tensor: tensor):
    generator = torch.Generator().manual_seed(2)
    lengths = ((3, 5, 1), (4, 2))
    documents = [[torch.randn(length, DIM, generator=generator) for length in group] for group in lengths]
    return {
        "documents_ids": [["a", "b", "c"], [1, 2]],
        "queries_embeddings": [convert(torch.randn(QUERY_LENGTH, DIM, generator=generator)) for _ in documents],
        "documents_embeddings": [[convert(document) for document in group] for group in documents],
    }


def assert_same_ranking(result, expected):
    assert [[hit["id"] for hit in hits] for hits in result] == [[hit["id"] for hit in hits] for hits in expected]
    for hits, expected_hits in zip(result, expected, strict=True):
        assert all(type(hit["score"]) is float for hit in hits)
        assert [hit["score"] for hit in hits] == pytest.approx([hit["score"] for hit in expected_hits], abs=1e-5)


@pytest.mark.parametrize(
    "convert, device",
    [(lambda tensor: tensor, None), (lambda tensor: tensor.numpy(), "cpu"), (lambda tensor: tensor.tolist(), None)],
    ids=["tensors", "arrays", "lists"],
)
def test_rerank_with_stock_masking_equals_stock(convert, device, calls):
    expected = rank.rerank(**candidates(convert), device=device)
    with pylate_fastmaxsim.enabled(stock_masking=True):
        result = rank.rerank(**candidates(convert), device=device)
    assert len(calls) == 2
    assert_same_ranking(result, expected)


@pytest.mark.parametrize("convert", [lambda tensor: tensor, lambda tensor: (50 * tensor).to(torch.int8)])
def test_rerank_of_generators_equals_stock(convert):
    def streamed():
        arguments = candidates(convert)
        return {
            "documents_ids": iter(arguments["documents_ids"]),
            "queries_embeddings": iter(arguments["queries_embeddings"]),
            "documents_embeddings": map(iter, arguments["documents_embeddings"]),
        }

    expected = rank.rerank(**streamed())
    with pylate_fastmaxsim.enabled(stock_masking=True):
        result = rank.rerank(**streamed())
    assert [[hit["id"] for hit in hits] for hits in result] == [[hit["id"] for hit in hits] for hits in expected]
    assert [hit["score"] for hits in result for hit in hits] == pytest.approx(
        [hit["score"] for hits in expected for hit in hits], abs=1e-5
    )


def test_rerank_takes_one_query_without_a_batch_dimension():
    arguments = candidates()
    arguments["queries_embeddings"] = arguments["queries_embeddings"][0]
    expected = rank.rerank(**arguments)
    with pylate_fastmaxsim.enabled(stock_masking=True):
        assert_same_ranking(rank.rerank(**arguments), expected)


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


def test_rerank_honours_a_backend_asked_for(calls, log, monkeypatch):
    monkeypatch.setenv("PYLATE_SCORES_BACKEND", "torch")
    expected = rank.rerank(**candidates())
    with pylate_fastmaxsim.enabled():
        assert rank.rerank(**candidates()) == expected
    assert not calls
    assert "PYLATE_SCORES_BACKEND=torch" in log.text


def test_retrieval_reranks_with_it(calls):
    class Index:
        def get_documents_embeddings(self, documents_ids):
            return [[torch.randn(3, DIM) for _ in ids] for ids in documents_ids]

    retriever = retrieve.ColBERT.__new__(retrieve.ColBERT)
    retriever.index = Index()
    hits = {"documents_ids": [[["a"], ["b", "a"]]]}
    with pylate_fastmaxsim.enabled():
        result = retriever._score_batch([torch.randn(QUERY_LENGTH, DIM)], hits, k=1, device="cpu")
    assert len(calls) == 1
    assert len(result[0]) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_takes_mixed_dtypes(dtype, calls):
    queries, documents = embeddings("colbert_scores")
    with torch.autocast("cpu", dtype=dtype):
        expected = scores.colbert_scores(queries, documents.to(dtype))
        with pylate_fastmaxsim.enabled():
            result = scores.colbert_scores(queries, documents.to(dtype))
    assert len(calls) == 1
    assert result.dtype == torch.float32
    torch.testing.assert_close(result, expected.float(), rtol=2e-2, atol=2e-2)


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
