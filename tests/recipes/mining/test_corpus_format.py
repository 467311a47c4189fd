"""Mining of compressed documents: the negatives of their scores, by any number of processes, with a first stage too."""

from __future__ import annotations

import pytest
import torch
from datasets import Dataset

from pylate_fastmaxsim import TokenBatch, compress, maxsim
from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.mining import mine as mining_mine
from pylate_fastmaxsim.recipes.mining import negatives
from pylate_fastmaxsim.recipes.mining.pairs import load_pairs
from pylate_fastmaxsim.recipes.models.load import load_model
from pylate_fastmaxsim.recipes.models.retriever import Retriever
from tests.support.mining_recipe import POSITIVES, SEARCH, TEACHER, mine_but_stop, parts_written, recipe_for, same_data

RULES = ["mining.relative_margin=-0.02"]


@pytest.fixture
def codecs(monkeypatch) -> list:
    """The codecs that are trained."""
    trained, train = [], negatives.train_codec
    monkeypatch.setattr(negatives, "train_codec", lambda *args: trained.append(train(*args)) or trained[-1])
    return trained


def mined(folder) -> dict[int, list[int]]:
    rows = Dataset.from_parquet(str(folder / "mined" / "train.parquet"))
    return {int(row["query_id"]): list(map(int, row["document_ids"][1:])) for row in rows}


STAGE = ["mining.first_stage={kind: bm25, k: 16}"]


@pytest.mark.parametrize(("name", "stage"), [("int8", []), ("fp8", STAGE), ("residual-1", []), ("residual-1", STAGE)])
def test_negatives_are_those_of_the_scores_of_compressed_documents(name, stage, encoder, teacher, codecs, tmp_path):
    candidates = []
    if stage:
        find = mining_mine.find_candidates
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(mining_mine, "find_candidates", lambda *a: candidates.append(find(*a)) or candidates[-1])
            recipe = recipe_for(
                tmp_path, encoder("modernbert"), teacher, *RULES, *stage, f"mining.corpus_format={name}"
            )
            mining_mine.mine(recipe)
    else:
        recipe = recipe_for(tmp_path, encoder("modernbert"), teacher, *RULES, f"mining.corpus_format={name}")
        mining_mine.mine(recipe)
    pairs = load_pairs(recipe.mining)
    model = load_model(recipe.model, "cpu", recipe.training.seed)
    q, d = (
        TokenBatch.from_list(model.encode(texts, is_query=is_query, convert_to_tensor=True))
        for texts, is_query in ((pairs.queries["text"][:], True), (pairs.documents["text"][:], False))
    )
    assert len(codecs) == (name == "residual-1")
    scores = maxsim(q, compress(d, codecs[0] if codecs else name))
    assert (scores - maxsim(q, d)).abs().max() > 1e-3
    expected = {}
    for query, positives in enumerate(pairs.positives()):
        asked = candidates[0][query].tolist() if stage else range(len(d))
        row = {x: scores[query, x].item() for x in {*asked, *positives} if x >= 0}
        ranked = sorted((x for x in asked if x >= 0 and x not in positives), key=lambda x: (-row[x], x))[:12]
        lowest = min(row[x] for x in positives)
        left = [x for x in ranked if row[x] <= lowest * 1.02][1:4]
        if len(left) == 3:
            expected[query] = left
    assert mined(tmp_path) == expected and len(expected) > 5


def test_an_interrupted_run_keeps_its_codec(encoder, teacher, codecs, tmp_path, monkeypatch):
    recipe = recipe_for(tmp_path, encoder("modernbert"), teacher, "mining.corpus_format=residual-2")
    mine_but_stop(recipe, "search", 1, monkeypatch)
    assert parts_written(recipe, monkeypatch) == [*SEARCH[1:], *POSITIVES, *TEACHER] and len(codecs) == 1
    again = recipe_for(
        tmp_path, encoder("modernbert"), teacher, "mining.corpus_format=residual-2", f"data.name={tmp_path / 'whole'}"
    )
    mining_mine.mine(again)
    assert same_data(tmp_path / "mined", tmp_path / "whole")


def test_another_format_searches_again(encoder, teacher, tmp_path, monkeypatch):
    plain = recipe_for(tmp_path, encoder("modernbert"), teacher)
    mine_but_stop(plain, "teacher", 1, monkeypatch)
    int8 = recipe_for(tmp_path, encoder("modernbert"), teacher, "mining.corpus_format=int8")
    mine_but_stop(int8, "positives", 2, monkeypatch)
    left = parts_written(int8, monkeypatch)
    assert left[:3] == POSITIVES[2:] and set(left[3:]) == {"teacher"}


def test_embeddings_that_do_not_suit_the_format_are_one_sentence(encoder, teacher, tmp_path, monkeypatch):
    recipe = recipe_for(tmp_path, encoder("modernbert"), teacher, "mining.corpus_format=int8")
    encode = Retriever.encode

    def broken(*args, **options):
        batch = encode(*args, **options)
        return batch.with_values(torch.full_like(batch.values, torch.nan))

    monkeypatch.setattr(Retriever, "encode", broken)
    with pytest.raises(RecipeError, match="^mining.corpus_format int8: compress: token vectors must be finite"):
        mining_mine.mine(recipe)
    with pytest.raises(
        RecipeError, match="corpus_format must be one of int8, fp8, residual-1, residual-2, residual-4 or"
    ):
        recipe_for(tmp_path, encoder("modernbert"), teacher, "mining.corpus_format=int4")
