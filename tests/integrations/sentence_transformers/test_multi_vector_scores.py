"""Scores and evaluators of Sentence Transformers' MultiVectorEncoder, with the maximum and other poolings."""

import json
import sys
from functools import partial

import numpy as np
import pytest
import torch
from sentence_transformers import util
from sentence_transformers.multi_vector_encoder import evaluation, scoring

import pylate_fastmaxsim
from pylate_fastmaxsim import LogSumExp, Max, PooledScores, Softmax, TopK
from pylate_fastmaxsim.integrations.sentence_transformers import scores as sentence_transformers_scores
from pylate_fastmaxsim.integrations.sentence_transformers import search
from pylate_fastmaxsim.retrieval.topk import largest
from tests.support.edited import edited
from tests.support.hosts import operators
from tests.support.multi_vector import NEGATIVES, POSITIVES, TEACHER, load
from tests.support.multi_vector import QUERIES as TEXTS
from tests.support.pooled_definitions import PlainScores

torch.manual_seed(0)
QUERIES = torch.randn(3, 5, 16)
DOCUMENTS = torch.randn(4, 7, 16)
GROUPS = torch.randn(3, 2, 7, 16)
QUERIES_MASK = torch.arange(5) < torch.tensor([5, 2, 0])[:, None]
DOCUMENTS_MASK = torch.rand(4, 7) < 0.6
DOCUMENTS_MASK[2] = False
GROUPS_MASK = torch.rand(3, 2, 7) < 0.6
GROUPS_MASK[1, 1] = False
RAGGED_QUERIES = [torch.randn(length, 16) for length in (1, 4, 3)]
RAGGED_DOCUMENTS = [torch.randn(length, 16) for length in (6, 2, 0)]
PADDED = torch.cat([QUERIES, torch.zeros(3, 2, 16)], dim=1)
MASKS = {"a_mask": QUERIES_MASK, "b_mask": DOCUMENTS_MASK}
GROUP_MASKS = {"queries_mask": QUERIES_MASK, "documents_mask": GROUPS_MASK}
XTR = scoring.xtr_scores, scoring.xtr_kd_scores

FAST = [
    (util.maxsim, (QUERIES, DOCUMENTS), MASKS),
    (util.maxsim, (QUERIES, DOCUMENTS), {**MASKS, "length_normalize": True, "chunk_elements": 9}),
    (util.maxsim, (QUERIES, DOCUMENTS), {"b_mask": DOCUMENTS_MASK[:1].long()}),
    (util.maxsim, (PADDED, -PADDED), {"length_normalize": True}),
    (util.maxsim, (RAGGED_QUERIES, RAGGED_DOCUMENTS), {}),
    (util.maxsim, (QUERIES, []), {"length_normalize": True}),
    (util.maxsim_pairwise, ([], []), {}),
    (util.maxsim, (RAGGED_QUERIES[1], RAGGED_DOCUMENTS), {"length_normalize": True}),
    (util.maxsim, ([query.numpy() for query in QUERIES], DOCUMENTS.numpy()), {}),
    (util.maxsim, (QUERIES.double(), DOCUMENTS.double()), MASKS),
    (util.mean_maxsim, (QUERIES, DOCUMENTS), MASKS),
    (util.maxsim_pairwise, (QUERIES, DOCUMENTS[:3]), {"a_mask": QUERIES_MASK, "b_mask": DOCUMENTS_MASK[:3]}),
    (util.mean_maxsim_pairwise, (RAGGED_QUERIES, RAGGED_DOCUMENTS), {}),
    (scoring.colbert_scores, (QUERIES, GROUPS), GROUP_MASKS),
    (scoring.mean_colbert_scores, (QUERIES, GROUPS), GROUP_MASKS),
    (scoring.colbert_kd_scores, (QUERIES, GROUPS), GROUP_MASKS),
    (scoring.colbert_kd_scores, (QUERIES.tolist(), GROUPS.tolist()), {}),
    (scoring.colbert_scores_pairwise, (QUERIES, GROUPS[:, 0]), {}),
    *((score, (QUERIES, GROUPS), {**masks, "top_k": 5}) for score in XTR for masks in ({}, GROUP_MASKS)),
    *((score, (QUERIES, GROUPS), {**masks, "top_k": 1000}) for score in XTR for masks in ({}, GROUP_MASKS)),
    (scoring.xtr_scores, (PADDED, -PADDED[:, None]), {"top_k": 9, "chunk_elements": 50}),
    (scoring.xtr_scores, (QUERIES[:2], GROUPS), {**GROUP_MASKS, "queries_mask": QUERIES_MASK[:2]}),
    (scoring.xtr_scores, (QUERIES.double(), GROUPS.double()), {**GROUP_MASKS, "top_k": 5}),
    (scoring.xtr_scores_pairwise, (QUERIES, GROUPS[:, 0]), {"top_k": 5}),
    (scoring.XTRKDScores(5, chunk_elements=50), (QUERIES, GROUPS), GROUP_MASKS),
]

LEFT_TO_STOCK = [
    (util.maxsim, (QUERIES, DOCUMENTS), {"a_mask": torch.rand(3, 5)}),
    (util.maxsim, (RAGGED_QUERIES, DOCUMENTS), {"a_mask": [torch.ones(len(query)) for query in RAGGED_QUERIES]}),
    (util.maxsim, ((QUERIES * 9).to(torch.int8), (DOCUMENTS * 9).to(torch.int8)), {}),
    (util.maxsim, ([query.tolist() for query in QUERIES], DOCUMENTS), {"b_mask": DOCUMENTS_MASK.numpy()}),
    (scoring.xtr_scores, (QUERIES, GROUPS), {"documents_mask": GROUPS_MASK.flatten(0, 1)}),
    (scoring.xtr_kd_scores, (QUERIES, GROUPS), {"top_k": np.int64(5)}),
]


def run(function, arguments, options):
    def leaf(value):
        if isinstance(value, list):
            return [leaf(each) for each in value]
        floating = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.detach().clone().requires_grad_() if floating else value

    arguments = [leaf(argument) for argument in arguments]
    scores = function(*arguments, **options)
    leaves = [each for value in arguments for each in (value if isinstance(value, list) else [value])]
    leaves = [each for each in leaves if isinstance(each, torch.Tensor) and each.requires_grad]
    if leaves and scores.requires_grad:
        (scores * torch.linspace(-1, 2, scores.numel()).view_as(scores)).sum().backward()
    return [scores.detach(), *(each.grad for each in leaves)]


def assert_equal(ours, stock):
    assert ours[0].dtype == stock[0].dtype and ours[0].shape == stock[0].shape
    for own, other in zip(ours, stock, strict=True):
        if own is None or other is None:
            assert (own is None or not own.any()) and (other is None or not other.any())
        else:
            torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("row", [*FAST, *LEFT_TO_STOCK])
def test_scores_and_gradients_are_those_of_stock(row, caplog):
    stock = run(*row)
    pylate_fastmaxsim.enable()
    assert_equal(run(*row), stock)
    left = any(row is each for each in LEFT_TO_STOCK)
    said = (
        f"{row[0].__qualname__} is not accelerated (running Sentence Transformers's own): " if left else "accelerated ("
    )
    assert (said in caplog.text) == left


similarity = sys.modules[util.maxsim.__module__]
counts = edited(similarity._query_token_counts, "clamp(min=1)", "clamp(min=3)")


@pytest.mark.parametrize("name, new", [("_query_token_counts", counts), ("_EMPTY_DOCUMENT_SCORE", -7.0)])
def test_edited_code_runs(name, new, monkeypatch, caplog):
    arguments = PADDED[:, -4:], DOCUMENTS * DOCUMENTS_MASK[..., None]
    plain = util.mean_maxsim(*arguments)
    monkeypatch.setattr(similarity, name, new)
    stock = util.mean_maxsim(*arguments)
    assert not torch.equal(stock, plain)
    pylate_fastmaxsim.enable()
    torch.testing.assert_close(util.mean_maxsim(*arguments), stock)
    assert f"{name} is not the code of a release" in caplog.text
    pylate_fastmaxsim.disable()
    monkeypatch.undo()


@pytest.mark.parametrize(
    "function, arguments",
    [
        (util.maxsim, (QUERIES, DOCUMENTS[..., :8])),
        (scoring.colbert_kd_scores, (QUERIES[:2], GROUPS)),
        (scoring.xtr_scores, (QUERIES, DOCUMENTS)),
        (scoring.xtr_kd_scores, (QUERIES[:2], GROUPS)),
        (scoring.XTRScores(0), (QUERIES, GROUPS)),
    ],
)
def test_errors_are_those_of_stock(function, arguments):
    with pytest.raises(Exception) as stock:
        function(*arguments)
    pylate_fastmaxsim.enable()
    with pytest.raises(type(stock.value)) as ours:
        function(*arguments)
    assert str(ours.value) == str(stock.value)


def test_half_precision_is_summed_in_float32():
    queries, documents = QUERIES.bfloat16(), DOCUMENTS.bfloat16()
    pylate_fastmaxsim.enable()
    scores = util.maxsim(queries, documents)
    exact = torch.einsum("ash,bth->abst", queries.double(), documents.double()).amax(-1).sum(-1)
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores.double(), exact, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("function", [scoring.colbert_scores, scoring.colbert_kd_scores, scoring.xtr_scores])
def test_one_call_scores_all_groups(monkeypatch, function):
    module = sentence_transformers_scores
    seen = operators((module, "pooled_scores"), (module, "xtr_scores"))(None, monkeypatch)
    pylate_fastmaxsim.enable()
    function(QUERIES, GROUPS)
    assert len(seen) == 1


@pytest.mark.compile
def test_xtr_scores_are_compiled_as_its_documentation_says():
    compiled = torch.compile(scoring.xtr_scores, backend="aot_eager")
    pylate_fastmaxsim.enable()
    given = (QUERIES, GROUPS), {**GROUP_MASKS, "top_k": 5}
    assert_equal(run(compiled, *given), run(scoring.xtr_scores, *given))
    torch._dynamo.reset()


LIVE = torch.arange(5) < torch.tensor([5, 2, 1])[:, None]
RAGGED = [vectors[mask] for vectors, mask in zip(QUERIES, LIVE, strict=True)]
PASSAGES = [vectors[mask] for vectors, mask in zip(GROUPS.flatten(0, 1), GROUPS_MASK.flatten(0, 1), strict=True)]


@pytest.mark.parametrize("pooling", [TopK(3), Softmax(0.3), LogSumExp(0.1), Max()], ids=str)
def test_every_score_pools(pooling):
    masks = {"queries_mask": LIVE, "documents_mask": GROUPS_MASK}
    all_pairs = PlainScores(PooledScores(pooling))(QUERIES, GROUPS, **masks)
    # An empty document ranks last, as ever in Sentence Transformers.
    all_pairs[:, 3] = util.maxsim(RAGGED, PASSAGES)[:, 3]
    own = all_pairs.view(3, 3, 2).diagonal().T
    counts = LIVE.sum(1, keepdim=True)
    pylate_fastmaxsim.enable(pooling=pooling)
    for ours, expected in (
        (util.maxsim(RAGGED, PASSAGES), all_pairs),
        (util.mean_maxsim(RAGGED, PASSAGES), all_pairs / counts),
        (util.maxsim_pairwise(RAGGED, PASSAGES[1::2]), own[:, 1]),
        (util.mean_maxsim_pairwise(RAGGED, PASSAGES[1::2]), own[:, 1] / counts[:, 0]),
        (scoring.colbert_scores(QUERIES, GROUPS, **masks), all_pairs),
        (scoring.mean_colbert_scores(QUERIES, GROUPS, **masks), all_pairs / counts),
        (scoring.colbert_kd_scores(QUERIES, GROUPS, **masks), own),
    ):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


def test_what_only_stock_takes_is_an_error_with_another_pooling():
    weighted = {"a_mask": torch.rand(3, 5)}
    pylate_fastmaxsim.enable(pooling=TopK(2))
    assert util.maxsim(QUERIES, []).shape == (3, 0)
    sentence = r"^maxsim: with enable\(pooling=TopK\(k=2\)\) .*: a mask of queries may weigh"
    with pytest.raises(ValueError, match=sentence):
        util.maxsim(QUERIES, QUERIES, **weighted)
    pylate_fastmaxsim.enable(pooling=Max())
    assert util.maxsim(QUERIES, QUERIES, **weighted).shape == (3, 3)


def test_evaluators_pool_with_the_flag_and_by_a_metric(encoder):
    model = load(encoder("bert")).float().eval()
    samples = [
        {"query": query, "positive": [positive], "negative": [negative]}
        for query, positive, negative in zip(TEXTS, POSITIVES, NEGATIVES, strict=True)
    ]
    ids = {str(place): query for place, query in enumerate(TEXTS)}
    corpus, relevant = dict(zip(ids, POSITIVES, strict=True)), {key: {key} for key in ids}
    rerank = partial(evaluation.MultiVectorRerankingEvaluator, samples, write_csv=False)
    search = partial(evaluation.MultiVectorInformationRetrievalEvaluator, ids, corpus, relevant, write_csv=False)
    labels = TEACHER[:, 0].tolist()
    distill = partial(evaluation.MultiVectorDistillationEvaluator, TEXTS, POSITIVES, labels, write_csv=False)
    metric, pairs = PooledScores(TopK(3)), PooledScores(TopK(3), own_documents=True)
    by_metric = [
        *(rerank(similarity_fct=metric, use_batched_encoding=batched)(model) for batched in (True, False)),
        search(score_functions={"maxsim": metric})(model),
        distill(similarity_fct=pairs)(model),
    ]
    usual = [rerank()(model), search()(model), distill()(model)]
    pylate_fastmaxsim.enable(pooling=TopK(3))
    with_flag = [rerank()(model), search()(model), distill()(model)]
    assert by_metric == [with_flag[0], *map(pytest.approx, with_flag)]
    assert all(one != other for one, other in zip(with_flag, usual, strict=True))


def rounded(queries, documents):
    """Scores among which many are equal."""
    return util.maxsim(queries, documents).round()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("chunk", [5, 50])
def test_an_evaluator_finds_what_stock_finds(encoder, monkeypatch, caplog, tmp_path, chunk, device):
    """The same metrics, and hits of equal scores in the order of their ids, which is not that of the documents."""
    searched = []
    monkeypatch.setattr(search, "largest", lambda *args: searched.append(args) or largest(*args))
    model = load(encoder("bert")).float().to(device)
    corpus = {f"d{(7 * place) % 16}": text for place, text in enumerate(POSITIVES + NEGATIVES)}
    relevant = {f"q{place}": {id} for place, id in enumerate(list(corpus)[: len(TEXTS)])}
    evaluate = evaluation.MultiVectorInformationRetrievalEvaluator(
        dict(zip(relevant, TEXTS, strict=True)),
        corpus,
        relevant,
        corpus_chunk_size=chunk,
        score_functions={"maxsim": util.maxsim, "rounded": rounded},
        map_at_k=[12],
        write_predictions=True,
    )
    found = []
    for switch in (pylate_fastmaxsim.disable, pylate_fastmaxsim.enable):
        switch()
        metrics = evaluate(model, output_path=str(tmp_path))
        rows = [json.loads(line) for file in sorted(tmp_path.glob("*.jsonl")) for line in file.open()]
        hits = [[(hit["corpus_id"], pytest.approx(hit["score"], 1e-5)) for hit in row["results"]] for row in rows]
        found.append((metrics, hits))
        assert len(searched) == (switch is pylate_fastmaxsim.enable) * 2 * -(-len(corpus) // chunk)
    assert found[0] == found[1] and "evaluat" not in caplog.text.lower()
    embeddings = model.encode_document(list(corpus.values()))
    assert evaluate.compute_all_metrics(model, corpus_embeddings=embeddings)["maxsim"]["map@k"][12] == pytest.approx(
        metrics["maxsim_map@12"]
    )
