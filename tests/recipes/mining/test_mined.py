import json
import math
from collections import Counter

import pytest
import torch
from datasets import Dataset
from sentence_transformers import CrossEncoder, SparseEncoder
from transformers import AutoTokenizer

from pylate_fastmaxsim import StaticLateInteraction, TokenBatch, compress, maxsim, pool_tokens, reference
from pylate_fastmaxsim.recipes.mining import negatives
from pylate_fastmaxsim.recipes.mining.mine import mine
from pylate_fastmaxsim.recipes.mining.pairs import load_pairs
from pylate_fastmaxsim.recipes.models.load import load_model
from pylate_fastmaxsim.recipes.models.retriever import Retriever, retriever_of
from pylate_fastmaxsim.recipes.training.train import train
from pylate_fastmaxsim.retrieval import search as exact_search
from tests.support.mining_recipe import TABLES, answers
from tests.support.recipe_kinds import LATE
from tests.support.saved_models import SPARSE, STATIC, embeddings, host_scores
from tests.support.tiny_recipe import hub_dataset, text


@pytest.fixture
def first_stage(saved):
    def override(kind: str | None, k: int = 16) -> list[str]:
        own = {"sparse": {"model": SPARSE}, "static": {"model": STATIC, "threshold": 0.5}}.get(kind, {})
        keys = {"kind": kind, "k": k, **own} | ({"model": saved(own["model"])} if own else {})
        return [] if kind is None else [f"mining.first_stage={json.dumps(keys)}"]

    return override


def first_scores(recipe, queries: list[str], documents: list[str]) -> torch.Tensor:
    """What a first stage scores, ``[Nq, Nd]``, by the host or by the book."""
    stage = recipe.mining.first_stage
    if stage.kind == "sparse":
        return host_scores(SparseEncoder(stage.model, device="cpu"), queries, documents)
    if stage.kind == "static":
        static = StaticLateInteraction.load(stage.model)
        encode = static.tokenizer.encode_batch
        q, d = ([row.ids for row in encode(t, add_special_tokens=False)] for t in (queries, documents))
        products = (static.query_vectors.double() @ static.document_vectors.double().T - stage.threshold).clamp(min=0)
        return torch.stack([torch.stack([products[a][:, b].amax(1).sum() for b in d]) for a in q])
    tokenizer = AutoTokenizer.from_pretrained(recipe.model.name_or_path)
    q, d = ([tokenizer.tokenize(each) for each in texts] for texts in (queries, documents))
    holding = Counter(token for tokens in d for token in set(tokens))
    mean, k1, b = sum(map(len, d)) / len(d), 1.5, 0.75

    def bm25(asked: list[str], tokens: list[str]) -> float:
        often = Counter(tokens)
        return sum(
            math.log(1 + (len(d) - holding[token] + 0.5) / (holding[token] + 0.5))
            * (often[token] * (k1 + 1) / (often[token] + k1 * (1 - b + b * len(tokens) / mean)))
            for token in sorted(asked)
        )

    return torch.tensor([[bm25(asked, tokens) for tokens in d] for asked in q])


MARGINS = {"absolute_margin": -0.5, "relative_margin": -0.3, "min_score": 6.0}


@pytest.mark.parametrize(
    ("stage", "stored", "rules"),
    [
        (None, None, {}),
        (None, None, MARGINS),
        (None, None, {"range_max": 4}),  # which leaves no document to spare, beside the positives of a query
        ("sparse", None, {"relative_margin": -0.3}),
        ("static", None, {"relative_margin": -0.3}),
        ("bm25", None, {"relative_margin": -0.3}),
        (None, None, {"pool_factor": 3}),
        (None, "int8", {"relative_margin": -0.02}),
        (None, "residual-1", {"relative_margin": -0.02}),
        ("bm25", "fp8", {"relative_margin": -0.02}),
        ("bm25", "residual-1", {"relative_margin": -0.02}),
    ],
)
def test_negatives_are_those_of_brute_force(stage, stored, rules, first_stage, recipe, teacher, tmp_path, monkeypatch):
    overrides = [*first_stage(stage), *(f"mining.{name}={value}" for name, value in rules.items())]
    own = [f"{text(i, 1 + i % 20)} extra {i}" for i in [*range(30), 3]] if rules is MARGINS else []
    if own:  # texts of a corpus, one of them twice, among texts that are positives as well
        rows = [{"passage": passage} for passage in [*own[:20], *answers(), *own[20:]]]
        overrides.append(f"mining.corpus={{source: hub, name: {hub_dataset(tmp_path / 'corpus', passages=rows)}}}")
    recipe = recipe(*overrides, f"mining.corpus_format={stored or 'null'}")
    encoded, codecs, encode, train_codec = [], [], Retriever.encode, negatives.train_codec

    def noting(self, texts, *args, is_query, **options):
        encoded.extend([] if is_query or not self.has_token_embeddings else texts)
        return encode(self, texts, *args, is_query=is_query, **options)

    monkeypatch.setattr(Retriever, "encode", noting)
    monkeypatch.setattr(exact_search, "PAIRS_AT_ONCE", 5)
    monkeypatch.setattr(negatives, "train_codec", lambda *args: codecs.append(train_codec(*args)) or codecs[-1])
    summary = mine(recipe)
    monkeypatch.undo()
    rows, queries, documents = (Dataset.from_parquet(f"{tmp_path}/mined/{name}.parquet") for name in TABLES)
    pairs, queries, documents = load_pairs(recipe.mining), queries["text"][:], documents["text"][:]
    assert (queries, documents) == (pairs.queries["text"][:], pairs.documents["text"][:])
    assert len(set(queries)) == len(queries) and documents == [*dict.fromkeys(answers()), *own[:30]]
    assert pairs.documents.cache_files  # and not in memory
    assert summary["rows"] + summary["left_out"] == len(pairs.rows) == 40 and summary["rows"] == len(rows) > 5

    model = load_model(recipe.model, "cpu", recipe.training.seed)
    q, d = (TokenBatch.from_list(embeddings(model, *each)) for each in ((queries, True), (documents, False)))
    d = pool_tokens(d, rules.get("pool_factor", 1), **retriever_of(model).pooling_options)
    exact = reference.maxsim(q, d)
    scores = exact if stored is None else maxsim(q, compress(d, codecs[0] if codecs else stored))
    assert len(codecs) == (stored == "residual-1") and (stored is None or (scores - exact).abs().max() > 1e-3)
    first = None if stage is None else first_scores(recipe, queries, documents).float()
    expected, asked, elsewhere = {}, set(), 0
    for query, positives in enumerate(pairs.positives()):
        candidates = list(range(len(d)))
        if stage is not None:
            order = first[query].sort(descending=True, stable=True).indices.tolist()
            candidates = [x for x in order if first[query, x] > 0][:16]
            asked.update(candidates)
        row = scores[query].tolist()
        # Positives need not be candidates for their scores to count.
        lowest, elsewhere = min(row[x] for x in positives), elsewhere + (not positives <= {*candidates})
        highest = min(lowest - rules.get("absolute_margin", -100), lowest * (1 - rules.get("relative_margin", -100)))
        # As Sentence Transformers does: what the rules leave of the best range_max, and as many more as there are positives.
        count = rules.get("range_max", 12)
        ranked = sorted(candidates, key=lambda x: (-row[x], x))[: count + max(map(len, pairs.positives()))]
        left = [x for x in ranked if x not in positives and rules.get("min_score", -100) <= row[x] <= highest][:count]
        if len(left[1:4]) == 3:
            expected[query] = left[1:4]
    grader = CrossEncoder(teacher, device="cpu")
    assert {int(row["query_id"]) for row in rows} == set(expected)
    for row in rows:
        query, (positive, *found) = int(row["query_id"]), map(int, row["document_ids"])
        assert (query, positive) in pairs.rows and found == expected[query]
        texts = [(queries[query], documents[int(x)]) for x in row["document_ids"]]
        assert row["scores"] == pytest.approx(grader.predict(texts).tolist(), abs=1e-5)
    if stage is not None and not codecs:
        searched, scored = encoded[: len(asked)], encoded[len(asked) :]
        assert sorted(searched) == sorted(documents[x] for x in asked)  # each once, and no other
        assert {*scored} == {documents[x] for positives in pairs.positives() for x in positives}
        assert elsewhere or stage != "sparse"


def test_queries_with_few_candidates_are_counted(first_stage, recipe, tmp_path, caplog):
    # The last query shares a term with its positive only.
    rows = [{"query": f"fused {i}", "answer": f"fused token {i}"} for i in range(39)]
    hub_dataset(tmp_path / "pairs", pair=[*rows, {"query": "late", "answer": "late"}])
    mine(recipe(*first_stage("bm25", k=13)))
    mined = Dataset.from_parquet(str(tmp_path / "mined" / "train.parquet"))
    assert mined["query_id"][:] == list(map(str, range(39)))
    assert "mining.first_stage finds fewer than 13 documents for 1 of 40 queries, which have fewer" in caplog.text


@pytest.mark.e2e
def test_mined_data_train_a_model_that_can_teach_as_well(recipe, tmp_path):
    mine(recipe())
    result = train(recipe())
    assert all(loss > 1e-3 for _, loss in result["losses"])
    again = [f"{key}={result['model']}" for key in ("model.name_or_path", "mining.teacher")]
    again += [f"data.name={tmp_path / 'mined-2'}", "mining.teacher_type=colbert", f"output_dir={tmp_path / 'out-2'}"]
    second = recipe(*again)
    mine(second)
    scores = Dataset.from_parquet(str(tmp_path / "mined-2" / "train.parquet"))["scores"][:]
    # Documents that the tokenizer makes the same are scored the same.
    assert all(min(row) == 0 and max(row) <= 1 for row in scores)
    assert sum(max(row) == pytest.approx(1) for row in scores) > len(scores) / 2
    losses = train(second)["losses"]
    # The student is its own teacher.
    assert losses[0][1] == pytest.approx(0, abs=1e-5) or LATE != "colbert"
