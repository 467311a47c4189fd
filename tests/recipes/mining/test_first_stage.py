"""Mining with a first stage: the best of its candidates, the same parts and the same data as without."""

from __future__ import annotations

import json
import math
import re
from collections import Counter

import pytest
import torch
from datasets import Dataset
from pylate.scores import colbert_scores
from sentence_transformers import SparseEncoder
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import AutoTokenizer

from pylate_fastmaxsim import StaticLateInteraction
from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.mining import mine as mining_mine
from pylate_fastmaxsim.recipes.mining import negatives
from pylate_fastmaxsim.recipes.mining.pairs import load_pairs
from pylate_fastmaxsim.recipes.models.load import load_model
from pylate_fastmaxsim.recipes.models.retriever import Retriever
from tests.support.mining_recipe import (
    POSITIVES,
    SEARCH,
    TEACHER,
    answers,
    mine_but_stop,
    parts_written,
    recipe_for,
    same_data,
)
from tests.support.models import load_model as load_colbert
from tests.support.sparse_encoders import build_sparse_encoder
from tests.support.tiny_recipe import hub_dataset, text

SPARSE, CANDIDATES = ["sparse"] * 3, ["candidates"] * 2  # of 40 documents, 15 in each, and of QN queries, 9 in each
KINDS = ("sparse", "static", "bm25")


@pytest.fixture(scope="module")
def saved(encoder, tmp_path_factory) -> dict[str, str]:
    """What ``mining.first_stage.model`` is of each kind that has one."""
    tokenizer = AutoTokenizer.from_pretrained(encoder("bert"))
    vectors = torch.randn(2, len(tokenizer), 8, generator=torch.Generator().manual_seed(0))
    static = tmp_path_factory.mktemp("static")
    StaticLateInteraction(*vectors, tokenizer=tokenizer, threshold=0.3).save(static)
    return {
        "sparse": build_sparse_encoder(tmp_path_factory.mktemp("sparse"), encoder("bert")),
        "static": str(static),
    }


@pytest.fixture
def recipe(encoder, teacher, saved, tmp_path):
    """The recipe of a kind of first stage, or of none."""

    def of(kind: str | None, *overrides: str, k: int = 16):
        keys = {"kind": kind, "k": k, **({"model": saved[kind]} if kind in saved else {})}
        stage = [] if kind is None else [f"mining.first_stage={json.dumps(keys)}"]
        return recipe_for(tmp_path, encoder("modernbert"), teacher, *stage, *overrides)

    return of


def sparse_scores(kind: str, recipe, queries: list[str], documents: list[str]) -> torch.Tensor:
    """What the first stage scores, ``[Nq, Nd]``, by the host or by the book."""
    if kind == "sparse":
        model = SparseEncoder(recipe.mining.first_stage.model, device="cpu")
        q, d = model.encode_query(queries).to_dense().double(), model.encode_document(documents).to_dense().double()
        return q @ d.T
    if kind == "static":
        static = StaticLateInteraction.load(recipe.mining.first_stage.model)
        q, d = (
            [row.ids for row in static.tokenizer.encode_batch(t, add_special_tokens=False)]
            for t in (queries, documents)
        )
        products = (static.query_vectors.double() @ static.document_vectors.double().T - 0.5).clamp(min=0)
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


@pytest.mark.parametrize("kind", KINDS)
def test_negatives_are_the_best_of_the_candidates(kind, recipe, tmp_path, monkeypatch):
    threshold = ["mining.first_stage.threshold=0.5"] if kind == "static" else []
    recipe = recipe(kind, "mining.relative_margin=-0.3", *threshold)
    encoded = []

    class Noting(Retriever):
        def encode(self, texts, *args, is_query, **options):
            encoded.extend([] if is_query else texts)
            return super().encode(texts, *args, is_query=is_query, **options)

    monkeypatch.setattr(negatives, "retriever_of", Noting)
    mining_mine.mine(recipe)
    pairs = load_pairs(recipe.mining)
    queries, documents = pairs.queries["text"][:], pairs.documents["text"][:]
    first = sparse_scores(kind, recipe, queries, documents).float()
    assert len({*first.flatten().tolist()}) > 100
    model = load_model(recipe.model, "cpu", recipe.training.seed)
    q, d = (
        model.encode(texts, is_query=is_query, convert_to_tensor=True)
        for texts, is_query in ((queries, True), (documents, False))
    )
    expected, asked, elsewhere = {}, set(), 0
    for query, positives in enumerate(pairs.positives()):
        order = first[query].sort(descending=True, stable=True).indices.tolist()
        candidates = [x for x in order if first[query, x] > 0][:16]
        asked.update(candidates)
        scores = {x: colbert_scores(q[query][None], d[x][None]).item() for x in {*candidates, *positives}}
        ranked = sorted((x for x in candidates if x not in positives), key=lambda x: (-scores[x], x))[:12]
        # Positives need not be candidates for their scores to count.
        lowest = min(scores[x] for x in positives)
        elsewhere += not positives <= set(candidates)
        left = [x for x in ranked if scores[x] <= lowest * 1.3][1:4]
        if len(left) == 3:
            expected[query] = left
    mined = Dataset.from_parquet(str(tmp_path / "mined" / "train.parquet"))
    found = {int(row["query_id"]): list(map(int, row["document_ids"][1:])) for row in mined}
    assert found == expected and len(found) > 10
    searched, scored = encoded[: len(asked)], encoded[len(asked) :]
    assert sorted(searched) == sorted(documents[x] for x in asked)  # each once, and no other
    assert {*scored} == {documents[x] for positives in pairs.positives() for x in positives}
    assert elsewhere or kind != "sparse"


@pytest.mark.parametrize("kind", ["static", pytest.param("bm25", marks=pytest.mark.e2e)])
def test_with_all_documents_as_candidates_the_data_are_those_without(kind, recipe, tmp_path):
    rows = [{"query": f"fused {text(i, 4)}", "answer": f"fused {each}"} for i, each in enumerate(answers())]
    hub_dataset(tmp_path / "pairs", pair=rows)
    for name, stage in (("whole", None), ("mined", kind)):
        mining_mine.mine(recipe(stage, f"data.name={tmp_path / name}", k=1000))
    assert same_data(tmp_path / "whole", tmp_path / "mined")


@pytest.mark.parametrize("stage", ["candidates", "search"])
def test_an_interrupted_run_goes_on_and_ends_the_same(stage, recipe, tmp_path, monkeypatch):
    stages = [*SPARSE, *CANDIDATES, *SEARCH, *POSITIVES, *TEACHER]
    mining_mine.mine(recipe("sparse", f"data.name={tmp_path / 'whole'}"))
    mine_but_stop(recipe("sparse"), stage, 1, monkeypatch)
    assert parts_written(recipe("sparse"), monkeypatch) == stages[stages.index(stage) + 1 :]
    assert same_data(tmp_path / "whole", tmp_path / "mined")


@pytest.mark.parametrize(
    ("kind", "overrides", "again", "said"),
    [
        ("bm25", ["mining.first_stage.k=17"], [*CANDIDATES, *SEARCH], "candidates .*: mining.first_stage."),
        ("sparse", [], [*SPARSE, *CANDIDATES, *SEARCH], "sparse .*: mining.first_stage, model."),
        (None, [], SEARCH, "search .*: the candidates of mining.first_stage."),
    ],
)
def test_a_changed_first_stage_searches_again(kind, overrides, again, said, recipe, monkeypatch, caplog):
    mine_but_stop(recipe("bm25"), "teacher", 2, monkeypatch)
    caplog.clear()
    assert parts_written(recipe(kind, *overrides), monkeypatch) == [*again, *TEACHER]
    assert re.search(f"finished parts of the stage {said}$", "\n".join(caplog.messages), re.MULTILINE)


def test_queries_with_few_candidates_are_counted(recipe, tmp_path, caplog):
    # The last query shares a term with its positive only.
    rows = [{"query": f"fused {i}", "answer": f"fused token {i}"} for i in range(39)]
    hub_dataset(tmp_path / "pairs", pair=[*rows, {"query": "late", "answer": "late"}])
    mining_mine.mine(recipe("bm25", k=13))
    mined = Dataset.from_parquet(str(tmp_path / "mined" / "train.parquet"))
    assert mined["query_id"][:] == list(map(str, range(39)))
    assert "mining.first_stage finds fewer than 13 documents for 1 of 40 queries, which have fewer" in caplog.text


@pytest.mark.parametrize(
    ("stage", "sentence"),
    [
        ("{kind: dense}", "mining.first_stage.kind must be one of sparse, static, bm25, got 'dense'."),
        ("{kind: bm25, k: 0}", "mining.first_stage.k must be an integer of at least 1, got 0."),
        (
            "{kind: bm25, model: a/b}",
            "mining.first_stage.model does not apply to mining.first_stage.kind bm25, but to sparse and static.",
        ),
        (
            "{kind: sparse, model: a/b, k1: 1}",
            "mining.first_stage.k1 does not apply to mining.first_stage.kind sparse, but to bm25.",
        ),
        ("{kind: bm25, threshold: 0.5}", "mining.first_stage.threshold does not apply to mining.first_stage.kind bm25"),
        (
            "{kind: static, model: SPARSE}",
            "must be of the kind static late interaction with mining.first_stage.kind static",
        ),
        (
            "{kind: static, model: UNFITTED}",
            "UNFITTED cannot be used: StaticLateInteraction: idf needs counts of tokens",
        ),
        ("{kind: sparse}", "mining.first_stage.model is missing; mining.first_stage.kind sparse needs it."),
        ("{kind: sparse, model: FILE}", "mining.first_stage.model must be a model on the Hub or a directory, but"),
        (
            "{kind: bm25, k: 15}",
            "mining.first_stage.k must be at least 16, mining.range_max plus the largest number of",
        ),
        ("{kind: sparse, model: /no/such}", "mining.first_stage.model: there is no folder /no/such."),
        (
            "{kind: sparse, model: COLBERT}",
            "must be of the kind sparse with mining.first_stage.kind sparse, but it is of the kind late",
        ),
    ],
)
def test_what_does_not_fit_is_one_sentence(stage, sentence, recipe, saved, encoder, tmp_path, monkeypatch):
    if "COLBERT" in stage:
        load_colbert(encoder("bert")).save_pretrained(str(tmp_path / "colbert"))
    if "UNFITTED" in stage:
        StaticLateInteraction(torch.eye(4), tokenizer=Tokenizer(BPE()), threshold=0.5, query_weights="idf").save(
            tmp_path / "idf"
        )
    for name, path in {"FILE": __file__, "COLBERT": "colbert", "SPARSE": saved["sparse"], "UNFITTED": "idf"}.items():
        stage, sentence = (each.replace(name, str(tmp_path / path)) for each in (stage, sentence))
    monkeypatch.setattr(mining_mine, "load_teacher", None)
    with pytest.raises(RecipeError) as error:
        mining_mine.mine(recipe(None, f"mining.first_stage={stage}"))
    assert sentence in str(error.value) and "\n" not in str(error.value)
