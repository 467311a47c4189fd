import random
from functools import partial

import numpy as np
import pytest
from datasets import Dataset

import pylate_fastmaxsim
from pylate_fastmaxsim import Softmax, TokenBatch, TopK, compress, maxsim, reference
from pylate_fastmaxsim.recipes.data.collection import Collection, document_texts, load_collection
from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.evaluation import ranking
from pylate_fastmaxsim.recipes.models.load import load_retriever
from pylate_fastmaxsim.recipes.models.retriever import retriever_of
from tests.support.beir_folder import QUERIES, judged, tables, write_folder
from tests.support.recipe_kinds import LATE as HOST
from tests.support.saved_models import LATE, SPARSE, STATIC, embeddings
from tests.support.tiny_recipe import text


@pytest.fixture
def collection(tmp_path) -> Collection:
    return load_collection(str(write_folder(tmp_path / "data")))


@pytest.fixture(autouse=True)
def several_batches(monkeypatch) -> None:
    monkeypatch.setattr(ranking, "BATCHES_AT_ONCE", 3)


@pytest.fixture
def late(saved):
    return load_retriever(saved(LATE), "cpu")


@pytest.fixture
def sparse(saved):
    model = load_retriever(saved(SPARSE), "cpu")
    # Of a route for each side and its prompt only encode_query and encode_document know.
    model.prompts = {"query": "rivers carry ", "document": "bees tell "}
    return model


def test_flops_are_the_mean_number_of_products_of_a_query_and_a_document(sparse, collection):
    _, sparsity = ranking.retrieve(retriever_of(sparse), collection, batch_size=8)
    queries = sparse.encode_query(list(collection.queries.values())).to_dense() != 0
    documents = sparse.encode_document(document_texts(collection.corpus[:])).to_dense() != 0
    expected = [(queries.double() @ documents.double().T).mean()]
    expected += [each.sum() / len(each) for each in (queries, documents)]
    assert list(sparsity.metrics()) == ["flops", "query_nonzeros", "document_nonzeros"]
    assert list(sparsity.metrics().values()) == pytest.approx(list(map(float, expected)), rel=1e-6)


@pytest.mark.parametrize("name", ["int8", "residual-2"])
def test_compressed_documents_are_ranked_by_their_own_scores(name, late, collection, monkeypatch):
    trained, train_codec = [], ranking.train_codec
    monkeypatch.setattr(ranking, "train_codec", lambda *args: trained.append(train_codec(*args)) or trained[-1])
    sides = (list(collection.queries.values()), True), (document_texts(collection.corpus[:]), False)
    q, d = (TokenBatch.from_list(embeddings(late, *side)) for side in sides)
    found, _ = ranking.retrieve(retriever_of(late), collection, batch_size=8, corpus_format=name)
    expected = maxsim(q, compress(d, trained[0] if trained else name)).sort(dim=1, descending=True, stable=True).values
    # In another batch a vector of Sentence Transformers may be rounded to the other side of a boundary between codes.
    rel = 1e-3 if HOST == "multi_vector" and trained else 1e-5
    for row, got in zip(expected, found.values(), strict=True):
        assert list(got.values()) == pytest.approx(row[: ranking.DEPTH].tolist(), rel=rel)
    plain, _ = ranking.retrieve(retriever_of(late), collection, batch_size=8)
    assert list(plain["q0"].values()) != pytest.approx(list(found["q0"].values()), rel=1e-5)


@pytest.mark.parametrize("enabled", [False, True])
def test_a_collection_is_searched_with_the_pooling(enabled, late, collection):
    pooling, texts = Softmax(0.2), document_texts(collection.corpus[:40])
    part = Collection(collection.corpus.select(range(40)), collection.queries, {})
    if enabled:
        pylate_fastmaxsim.enable()
    found, _ = ranking.retrieve(retriever_of(late), part, 8, pooling)
    sides = (list(collection.queries.values()), True), (texts, False)
    q, d = (TokenBatch.from_list(embeddings(late, *each)) for each in sides)
    scores = reference.pooled_scores(q, d, pooling=pooling)
    for row, results in zip(scores.tolist(), found.values(), strict=True):
        assert results == pytest.approx(dict(zip(part.corpus["_id"], row, strict=True)), rel=1e-5)


def ranked(model, folder, **changed: list[dict]) -> ranking.Ranking:
    return ranking.retrieve(retriever_of(model), load_collection(str(write_folder(folder, **changed))), batch_size=8)[0]


OWN = [{"title": "", "text": text(3, 5)}]
OWN.append({"title": "a topic", "text": f" {text(3, 5)}\n"})  # as in ArguAna
OWN.append({"title": text(3, 5), "text": "an abstract"})  # as in SciDocs


@pytest.mark.parametrize("own", OWN)
def test_the_query_itself_is_no_result(own, late, tmp_path):
    content = tables()
    # With the query itself one more than are looked at, so that it would be among them or take a rank from another.
    corpus = content["corpus"][: ranking.DEPTH]
    plain = ranked(late, tmp_path / "plain", corpus=corpus)
    assert content["queries"][1] == {"_id": "q1", "text": text(3, 5)}
    found = ranked(late, tmp_path / "own", corpus=[{"_id": "q1", **own}, *corpus])
    assert len(found["q1"]) == len(plain["q1"]) == ranking.DEPTH
    assert found["q1"] == pytest.approx(plain["q1"], rel=1e-5)


def test_the_query_itself_is_a_result_of_other_queries_and_where_it_is_judged_relevant(late, tmp_path):
    content = tables()
    corpus = [{"_id": "q1", "title": "", "text": text(3, 5)}, *content["corpus"][:60]]
    qrels = [row for row in content["qrels"] if row["corpus-id"] < "0060"]
    for grade in (0, 1):
        own = judged(("q1", "q1", grade))
        found = ranked(late, tmp_path / f"grade-{grade}", corpus=corpus, qrels=[*qrels, *own])
        assert ("q1" in found["q1"]) == bool(grade) and "q1" in found["q2"]
    # Where queries and documents are numbered independently of each other, as in Cranfield.
    corpus = [row | {"_id": f"q{number}"} for number, row in enumerate(content["corpus"][:90])]
    qrels = judged(*((f"q{row}", f"q{row + 7}", 1) for row in range(QUERIES)))
    found = ranked(late, tmp_path / "numbered", corpus=corpus, qrels=qrels)
    assert all(len(results) == 90 for results in found.values())


def test_documents_may_lack_a_title_or_a_text(late, tmp_path):
    qrels, corpus = judged(("q1", "0001", 1)), tables()["corpus"][:9]
    corpus[3]["title"] = corpus[4]["text"] = None
    assert len(ranked(late, tmp_path / "null", corpus=corpus, qrels=qrels)["q1"]) == 9
    for row in corpus:
        del row["title"]
    assert len(ranked(late, tmp_path / "none", corpus=corpus, qrels=qrels)["q1"]) == 9


def test_what_shares_no_term_with_a_query_is_no_result(sparse, collection, monkeypatch):
    def few_terms(texts, encode, **options):
        vectors = encode(texts, **options).to_dense()
        vectors[:, 20:] = 0
        vectors[-1] = 0
        return vectors.to_sparse()

    for name in ("encode_query", "encode_document"):
        monkeypatch.setattr(sparse, name, partial(few_terms, encode=getattr(sparse, name)))
    found, _ = ranking.retrieve(retriever_of(sparse), collection, batch_size=8)
    assert not found["q5"] and found["q0"] and not any("0149" in results for results in found.values())


@pytest.mark.parametrize("kind", [SPARSE, STATIC])
def test_a_pooling_is_refused_where_there_are_no_tokens(kind, saved, collection):
    with pytest.raises(RecipeError, match="loss.pooling must be max for a sparse or static model"):
        ranking.retrieve(retriever_of(load_retriever(saved(kind), "cpu")), collection, 8, TopK(2))


NAMES = ("ndcg@10", "mrr@10", "recall@100")


def defined(name: str, ranked: list[str], grades: dict[str, int]) -> float:
    """A metric as trec_eval has it: a grade below 1 is not relevant and has no gain."""
    depth = int(name.split("@")[1])
    gains = np.array([max(grades.get(document, 0), 0) for document in ranked[:depth]], dtype=float)
    ideal = np.sort([max(grade, 0) for grade in grades.values()])[::-1][:depth].astype(float)
    if not ideal.any() or not gains.any():
        return 0.0
    if name.startswith("ndcg"):
        dcg, best = (float(np.sum(each / np.log2(np.arange(len(each)) + 2))) for each in (gains, ideal))
        return dcg / best
    if name.startswith("mrr"):
        return 1 / (1 + int(np.flatnonzero(gains)[0]))
    return float((gains > 0).sum() / sum(grade > 0 for grade in grades.values()))


def shuffled(draw: random.Random, values: dict) -> dict:
    return dict(draw.sample(list(values.items()), len(values)))


@pytest.mark.e2e  # ranx compiles for seconds
@pytest.mark.parametrize("order", ["same", "random"])
def test_rankings_are_paired_with_the_judgements_of_their_query(order):
    draw = random.Random(0)
    documents = [f"d{number}" for number in range(150)]
    # As numbers in text, which are sorted otherwise than they are counted.
    grades = {str(n): {each: draw.randint(-2, 3) for each in draw.sample(documents, 1 + n)} for n in range(21)}
    found = {query: draw.sample(documents, len(documents) - 5 * int(query)) for query in grades}
    grades |= {"found nothing": {"d1": 1}, "nothing relevant": {"d1": 0, "d2": -1}, "not searched": {"d3": 2}}
    found |= {"found nothing": [], "nothing relevant": ["d1", "d2"], "not judged": ["d1"]}
    expected = {name: {q: defined(name, found.get(q, []), own) for q, own in grades.items()} for name in NAMES}
    if order == "random":
        grades = shuffled(draw, {query: shuffled(draw, own) for query, own in grades.items()})
        found = shuffled(draw, found)
    collection = Collection(Dataset.from_list([]), dict.fromkeys(found, ""), grades)
    # Equal scores: the order of the ranking counts.
    searched = {query: dict.fromkeys(own, 1.0) for query, own in found.items()}
    measured = ranking.metrics_by_query(searched, collection, NAMES)
    for name in NAMES:
        assert list(measured[name]) == sorted(grades)
        assert measured[name] == pytest.approx(expected[name], abs=1e-12)
        assert len(set(expected[name].values())) > 5  # so that another pairing would be seen
    means = {name: np.mean(list(expected[name].values())) for name in NAMES}
    assert ranking.metrics_of(searched, collection, NAMES) == pytest.approx(means, abs=1e-12)
    first = {"ndcg@10": means["ndcg@10"]}
    assert ranking.metrics_of(searched, collection, NAMES[:1]) == pytest.approx(first, abs=1e-12)
