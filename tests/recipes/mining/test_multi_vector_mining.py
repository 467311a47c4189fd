"""Mining with a MultiVectorEncoder, by a teacher of late interaction, and distillation of what it writes."""

from __future__ import annotations

import json

import pytest
import torch
from sentence_transformers import MultiVectorEncoder

from pylate_fastmaxsim.recipes.load import load_recipe
from pylate_fastmaxsim.recipes.mining.mine import mine
from pylate_fastmaxsim.recipes.training.train import train
from tests.support.mining_recipe import answers, write_pairs
from tests.support.multi_vector_recipe import tiny_multi_vector
from tests.support.tiny_recipe import write


@pytest.mark.e2e
@pytest.mark.parametrize("first_stage", [None, {"kind": "bm25", "k": 30}])
def test_mined_negatives_are_those_of_the_host_and_are_distilled(first_stage, encoder, tmp_path):
    torch.manual_seed(0)
    teacher = MultiVectorEncoder(encoder("bert"), device="cpu")
    teacher.save_pretrained(str(tmp_path / "teacher"))
    content = tiny_multi_vector(
        tmp_path, loss={"name": "distillation"}, training={"max_steps": 3}, evaluation={"rows": 6}
    )
    content["model"] = {"kind": "multi_vector", "name_or_path": str(tmp_path / "teacher"), "document_length": 32}
    content["data"] = {"source": "distillation", "name": str(tmp_path / "mined")}
    content["mining"] = {
        "pairs": {"source": "hub", "name": str(write_pairs(tmp_path / "pairs", answers()))},
        "teacher": str(tmp_path / "teacher"),
        "teacher_type": "colbert",
        "first_stage": first_stage,
        "num_negatives": 3,
        "range_max": 12,
        "batch_size": 4,
        "documents_per_part": 15,
        "rows_per_part": 9,
    }
    recipe = load_recipe(write(tmp_path, content))
    summary = mine(recipe)
    assert summary["rows"] == 40
    result = train(recipe)
    assert result["steps"] == 3 and result["kl_divergence"] > 0
    if first_stage is not None:
        return
    # The hardest negative of a query is the best document by the host's scores that is not its positive.
    model = MultiVectorEncoder(str(tmp_path / "teacher"), device="cpu")
    model[0].document_length = 32
    tables = {name: _rows(tmp_path / "mined" / f"{name}.parquet") for name in ("train", "queries", "documents")}
    texts = {row["document_id"]: row["text"] for row in tables["documents"]}
    names = list(texts)
    documents = model.encode_document(list(texts.values()))
    positives = {}
    for row in tables["train"]:
        positives.setdefault(row["query_id"], set()).add(row["document_ids"][0])
    queries = {row["query_id"]: row["text"] for row in tables["queries"]}
    for row in tables["train"][:8]:
        (scores,) = model.similarity(model.encode_query([queries[row["query_id"]]]), documents)
        ranked = [names[place] for place in scores.argsort(descending=True).tolist()]
        own = positives[row["query_id"]]
        hardest = [name for name in ranked if name not in own][:3]
        # Some documents are the same tokens.
        found, expected = (
            [float(scores[names.index(name)]) for name in each] for each in (row["document_ids"][1:], hardest)
        )
        assert found == pytest.approx(expected, rel=1e-5) and not own.intersection(row["document_ids"][1:])


def _rows(file) -> list[dict]:
    from datasets import Dataset

    return json.loads(json.dumps(Dataset.from_parquet(str(file)).to_list()))
