"""Evaluators of a SparseEncoder: stock's metrics, files and log."""

import json
import logging

import pytest
import torch

from tests.support.models import sentences
from tests.support.sparse_encoders import load_sparse

pytest.importorskip("sentence_transformers", minversion="5", reason="no SparseEncoder before Sentence Transformers 5")

from sentence_transformers import SentenceTransformer, util
from sentence_transformers.sparse_encoder.evaluation import SparseInformationRetrievalEvaluator

import pylate_fastmaxsim

DenseEvaluator = SparseInformationRetrievalEvaluator.__base__
# From release 6 on stock orders equal scores by id, before by chance.
ORDERED = hasattr(DenseEvaluator, "get_corpus_id_ranks")
COUNT = 70
# Ids whose order is not that of the documents.
CORPUS = {f"d{(37 * i) % COUNT}": text for i, text in enumerate(sentences(COUNT, 20, seed=2))}
QUERIES = {f"q{i}": text for i, text in enumerate(sentences(9, 6, seed=1))}
FUNCTIONS = {"dot": util.dot_score, "cosine": util.cos_sim}


@pytest.fixture(scope="module")
def model(encoder):
    return load_sparse(encoder("bert"))


def relevant_documents(model, functions=(util.dot_score,), **options) -> dict[str, set[str]]:
    """Documents of each query with a score above 0 that no other has; of one query none."""
    queries, corpus = (model.encode(list(texts.values()), **options) for texts in (QUERIES, CORPUS))
    scores = torch.stack([function(queries, corpus) for function in functions])
    ids = list(CORPUS)
    alone = ((scores > 0) & ((scores[..., None] == scores[:, :, None]).sum(dim=-1) == 1)).all(dim=0)
    found = {
        query: {ids[place] for place in torch.where(places, row, 0).topk(6).indices[[0, 2, 5]] if places[place]}
        for query, places, row in zip(QUERIES, alone, scores[0], strict=True)
    }
    assert sum(map(bool, found.values())) >= 5
    return {**found, "q0": set()}


@pytest.fixture(scope="module")
def relevant(model):
    return relevant_documents(model)


def evaluator_of(relevant, kind=SparseInformationRetrievalEvaluator, **options):
    options = {"corpus_chunk_size": 32, "name": "tiny", "write_predictions": True, **options}
    return kind(queries=QUERIES, corpus=CORPUS, relevant_docs=relevant, **options)


def evaluate(evaluator, model, folder) -> dict:
    metrics = evaluator(model, output_path=str(folder))
    written = {}
    for file in sorted(folder.iterdir()):
        text = file.read_text()
        if file.suffix == ".jsonl":
            lines = [json.loads(line) for line in text.splitlines()]
            for line in lines:
                line["results"] = [
                    (hit["corpus_id"], pytest.approx(hit["score"]))
                    for hit in line["results"]
                    if ORDERED or hit["score"]
                ]
                if not ORDERED:
                    line["results"].sort(key=lambda hit: (hit[1].expected, hit[0]))
            text = lines
        written[file.name] = text
    return {"metrics": metrics, "primary": evaluator.primary_metric, "written": written}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"corpus_chunk_size": 50000, "ndcg_at_k": [3], "map_at_k": [5], "precision_recall_at_k": [2], "mrr_at_k": [4]},
        {"score_functions": FUNCTIONS, "main_score_function": "cosine", "max_active_dims": 5},
        {"query_prompt": "bread ", "corpus_prompt": "the moon ", "show_progress_bar": True, "corpus_chunk_size": 1},
    ],
)
def test_metrics_and_files_are_those_of_stock(model, searches, tmp_path, caplog, options):
    caplog.set_level(logging.INFO)
    functions = options.get("score_functions", {"dot": util.dot_score})
    relevant = relevant_documents(model, functions.values(), max_active_dims=options.get("max_active_dims"))
    found, said = [], []
    for name in ("stock", "ours"):
        (tmp_path / name).mkdir()
        with pylate_fastmaxsim.enabled() if name == "ours" else caplog.at_level(logging.INFO):
            caplog.clear()
            found.append(evaluate(evaluator_of(relevant, **options), model, tmp_path / name))
        said.append([each.getMessage() for each in caplog.records if each.name.startswith("sentence_transformers")])
    assert found[0] == found[1] and said[0] == said[1]
    size = options.get("corpus_chunk_size", 32)
    chunks = [min(size, COUNT - start) for start in range(0, COUNT, size)]
    assert searches == [count for count in chunks for _ in functions]


def test_equal_scores_keep_the_order_that_the_release_defines(model, tmp_path):
    """By id from release 6 on; before, where stock has none, by position. Here all documents are equal."""
    corpus = dict.fromkeys(CORPUS, "Bread rises when yeast turns sugar into gas.")
    relevant = {query: {list(CORPUS)[20]} for query in QUERIES}
    options = {"corpus_chunk_size": 32, "map_at_k": [40], "write_predictions": True}
    evaluator = SparseInformationRetrievalEvaluator(QUERIES, corpus, relevant, **options)
    pylate_fastmaxsim.enable()
    metrics = evaluator(model, output_path=str(tmp_path))
    ids = sorted(CORPUS) if ORDERED else list(CORPUS)
    for line in (tmp_path / "Information-Retrieval_evaluation_predictions_dot.jsonl").read_text().splitlines():
        assert [hit["corpus_id"] for hit in json.loads(line)["results"]] == ids[:40]
    place = ids.index(list(CORPUS)[20])
    assert metrics["dot_map@40"] == (pytest.approx(1 / (place + 1)) if place < 40 else 0)


@pytest.mark.parametrize("dense", [False, True])
def test_a_corpus_that_is_encoded_before(model, relevant, searches, dense):
    embeddings = model.encode_document(list(CORPUS.values()))
    found = []
    # Stock cannot slice sparse embeddings in all releases.
    for switch, given in (
        (pylate_fastmaxsim.disable, embeddings.to_dense()),
        (pylate_fastmaxsim.enable, embeddings.to_dense() if dense else embeddings),
    ):
        switch()
        evaluator = evaluator_of(relevant, score_functions={"dot": util.dot_score})
        found.append(evaluator.compute_metrices(model, corpus_embeddings=given))
    assert found[0] == found[1] and bool(searches) != dense


class Negated(SparseInformationRetrievalEvaluator):
    chunks = 0

    def embed_inputs(self, model, sentences, encode_fn_name=None, **options):
        embeddings = super().embed_inputs(model, sentences, encode_fn_name, **options)
        self.chunks += encode_fn_name == "document"
        return -embeddings if encode_fn_name == "document" and self.chunks == 2 else embeddings

    def compute_metrics(self, queries_result_list):
        rows = [sorted(row, key=lambda hit: (-hit["score"], hit["corpus_id"])) for row in queries_result_list]
        return super().compute_metrics([row[1:] for row in rows])


def test_hooks_of_a_subclass_are_called_and_a_chunk_with_negative_weights_is_stock_s(model, relevant, searches, caplog):
    stock = evaluator_of(relevant, Negated)
    metrics = stock(model)
    pylate_fastmaxsim.enable()
    ours = evaluator_of(relevant, Negated)
    assert ours(model) == metrics
    assert ours.chunks == stock.chunks == 3 and searches == [32, 6]
    (line,) = (line for line in caplog.messages if "Evaluator is not accelerated" in line)
    assert line.startswith("InformationRetrievalEvaluator is not accelerated") and "negative" in line


@pytest.mark.parametrize("dense", [False, True])
def test_other_scores_and_dense_evaluators_are_left_to_stock(encoder, model, relevant, searches, caplog, dense):
    functions = {"dot": util.dot_score, "manhattan": util.manhattan_sim}
    options = {"kind": DenseEvaluator} if dense else {"score_functions": functions}
    model = SentenceTransformer(encoder("bert"), device="cpu") if dense else model
    stock = evaluator_of(relevant, **options)(model)
    pylate_fastmaxsim.enable()
    assert evaluator_of(relevant, **options)(model) == stock
    assert not searches
    assert dense != ("the score function manhattan_sim is neither dot_score nor cos_sim" in caplog.text)


@pytest.mark.cuda
@pytest.mark.parametrize("kind", FUNCTIONS)
def test_on_a_gpu_metrics_are_those_of_stock(kind, encoder, searches, tmp_path):
    model = load_sparse(encoder("bert")).to("cuda")
    relevant = relevant_documents(model, FUNCTIONS.values())
    evaluator = evaluator_of(relevant, score_functions={kind: FUNCTIONS[kind]}, write_predictions=False)
    stock = evaluator(model, output_path=str(tmp_path))
    with pylate_fastmaxsim.enabled():
        ours = evaluator(model, output_path=str(tmp_path))
    assert searches and ours == stock
