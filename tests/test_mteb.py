"""Retrieval and reranking tasks of mteb, searched exactly: mteb's own metrics of the whole matrix of scores."""

import pytest
from datasets import Dataset

import pylate_fastmaxsim
from pylate_fastmaxsim.mteb import ExactSearch
from pylate_fastmaxsim.recipes.models.retriever import retriever_of
from tests.support.hosts import each_host
from tests.support.models import sentences

mteb = pytest.importorskip("mteb", minversion="2", reason='mteb is not installed: pip install "mteb>=2"')
mocks = pytest.importorskip("mteb.mocks.mock_tasks.retrieval")

pytestmark = pytest.mark.e2e
QUERIES = {f"q{place}": text for place, text in enumerate(sentences(7, 6, seed=1))}
# More than mteb's k_values need; with a title, which mteb puts before a text.
CORPUS = {f"d{(37 * place) % 150}": text for place, text in enumerate(sentences(150, 20, seed=2))}
RANKED = {query: [f"d{number}" for number in range(place, 120, 7)] for place, query in enumerate(QUERIES)}


class Task(mocks.MockRetrievalTask):
    top_ranked = relevant = None

    def load_data(self, *_, **__):
        corpus = [{"id": id, "text": text, "title": "Bees"} for id, text in CORPUS.items()]
        split = {
            "queries": Dataset.from_list([{"id": id, "text": text} for id, text in QUERIES.items()]),
            "corpus": Dataset.from_list(corpus),
            "relevant_docs": self.relevant,
            "top_ranked": self.top_ranked,
        }
        self.dataset, self.data_loaded = {"default": {"test": split, "val": split}}, True


def expected(model, ranked) -> dict[str, dict[str, float]]:
    """Scores by id of all documents of each query, or of its ranked ones, best first."""
    retriever, ids = retriever_of(model), list(CORPUS)
    queries = retriever.encode(list(QUERIES.values()), 32, is_query=True)
    documents = retriever.encode([f"Bees {text}" for text in CORPUS.values()], 32, is_query=False)
    scores, places = (each.tolist() for each in retriever.search(queries, [documents], len(CORPUS)))
    rows = [{ids[place]: score for place, score in zip(*row, strict=True)} for row in zip(places, scores, strict=True)]
    return {
        query: {id: score for id, score in row.items() if ranked is None or id in ranked[query]}
        for query, row in zip(QUERIES, rows, strict=True)
    }


@pytest.mark.parametrize("ranked", [None, RANKED], ids=["retrieval", "reranking"])
@pytest.mark.parametrize("host", each_host())
def test_a_task_is_searched_exactly(host, encoder, ranked, monkeypatch):
    """The third document is relevant, so that nDCG is 1 / log2(4)."""
    model, searched = host.model(encoder).float().eval(), []
    by_hand = expected(model, ranked)
    monkeypatch.setattr(Task, "top_ranked", ranked)
    monkeypatch.setattr(Task, "relevant", {query: {list(row)[2]: 1} for query, row in by_hand.items()})
    monkeypatch.setattr(Task, "_save_task_predictions", lambda task, results, *_, **__: searched.append(results))
    pylate_fastmaxsim.enable()
    options = {"cache": None, "co2_tracker": False, "prediction_folder": "unused", "encode_kwargs": {"batch_size": 1}}
    result = mteb.evaluate(ExactSearch(model), Task(), **options)
    assert searched == 2 * [{query: pytest.approx(row, 1e-5) for query, row in by_hand.items()}]
    assert [each["ndcg_at_10"] for each in result.task_results[0].scores["test"]] == [0.5]


@pytest.mark.parametrize("host", each_host())
def test_a_prompt_of_the_task_and_options_of_encode_are_used(host, encoder, monkeypatch):
    model, asked = host.model(encoder), []
    model.prompts = {"MockRetrievalTask-query": "find: ", "query": "no: ", "document": "text: "}
    kind = type(retriever_of(model))
    encode = kind.encode
    monkeypatch.setattr(kind, "encode", lambda *args, **options: asked.append((args[2:], options)) or encode(*args))
    search = ExactSearch(model)
    search.index(Dataset.from_list([{"id": "d1", "text": "Bees dance.", "title": ""}]))
    options = {"task_metadata": Task.metadata, "top_k": 3, "encode_kwargs": {"batch_size": 5, "normalize": True}}
    found = search.search(Dataset.from_list([{"id": "q1", "text": "Why do bees dance?"}]), **options)
    assert list(found) == ["q1"] and search.mteb_model_meta.experiment_kwargs == {"search": "exact"}
    prompts = ((True, "find: "), (False, "text: "))
    assert asked == [((5, is_query, False), {"prompt": prompt, "normalize": True}) for is_query, prompt in prompts]
