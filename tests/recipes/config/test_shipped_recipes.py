"""The recipes that come with the package, each for a few steps on stand-ins of the model and data that it names."""

from __future__ import annotations

from pathlib import Path

import pytest
from paths import RECIPES

pytest.importorskip("datasets")
pytest.importorskip("pylate")

from tiny_recipe import few_steps, hub_dataset, text

from pylate_fastmaxsim.recipes.evaluation.held_out import retrieval_evaluator
from pylate_fastmaxsim.recipes.load import load_recipe
from pylate_fastmaxsim.recipes.models.load import load_model
from pylate_fastmaxsim.recipes.training.inputs import load_data
from pylate_fastmaxsim.recipes.training.train import train

FAMILIES = ("modernbert", "bert", "xlm-roberta")


def losses_both_ways(name: str, tmp_path: Path, *overrides: str) -> list[float]:
    """Train a shipped recipe stock and fast; its losses, which must be the same to rounding."""
    results = []
    for fast in ("false", "true"):
        options = few_steps(tmp_path / fast, *overrides, f"fast.enabled={fast}", f"fast.stock_masking={fast}")
        results.append(train(load_recipe(RECIPES / f"{name}.yaml", options)))
    stock, fast = ([loss for _, loss in result["losses"]] for result in results)
    assert len(stock) == 2 and fast == pytest.approx(stock, rel=1e-3)
    assert all(0 <= result["ndcg@10"] <= 1 for result in results)
    return stock


@pytest.mark.parametrize("family", FAMILIES)
def test_msmarco(family, encoder, tmp_path, caplog):
    rows = [{"query": text(i, 5), "positive": text(i, 9), "negative": text(i + 1, 30)} for i in range(40)]
    data = hub_dataset(tmp_path / "data", triplet=rows)
    overrides = [f"model.name_or_path={encoder(family)}", f"data.name={data}", "evaluation.rows=8"]
    losses_both_ways("colbert_msmarco", tmp_path, *overrides)
    # The recipe's dropouts are those of ModernBERT.
    said = [line for line in caplog.messages if line.startswith("model.config_kwargs is left out where ")]
    assert len(said) == (family != "modernbert")
    assert all(line.endswith("no such value: embedding_dropout, attention_dropout, mlp_dropout.") for line in said)
    recipe = load_recipe(RECIPES / "colbert_msmarco.yaml", few_steps(tmp_path / "out", *overrides))
    held_out = load_data(recipe).held_out
    assert held_out.column_names == ["query", "positive", "negative"]
    model = load_model(recipe.model, "cpu", seed=0)
    evaluator = retrieval_evaluator(recipe, held_out, model)
    assert set(evaluator.queries) == set(held_out["query"])
    assert set(evaluator.corpus) == {*held_out["positive"], *held_out["negative"]}


@pytest.mark.parametrize("family", FAMILIES)
def test_gradcache(family, encoder, tmp_path):
    rows = [{"query": text(i, 5), "document": text(i, 3 + i % 20), "dataset": "gooaq", "shard": 0} for i in range(40)]
    data = hub_dataset(tmp_path / "data", gooaq=rows)
    overrides = [f"model.name_or_path={encoder(family)}", f"data.name={data}", "evaluation.rows=8"]
    overrides += ["data.config=gooaq", "data.split=train"]
    cached = losses_both_ways("colbert_gradcache", tmp_path / "cached", *overrides, "loss.mini_batch_size=3")
    plain = ["loss={name: contrastive, temperature: 0.02}"]
    assert losses_both_ways("colbert_gradcache", tmp_path / "plain", *overrides, *plain) == pytest.approx(
        cached, rel=1e-3
    )


def test_long_documents(encoder, tmp_path):
    # More rows are longer than 8,192 tokens, at one token a word or more, than are held out.
    lengths = (9000, 9000, 9000, 50, 50, 50)
    rows = [{"anchor": text(i, 5), "positive": text(i, n), "negative": text(i + 1, 300)} for i, n in enumerate(lengths)]
    data = hub_dataset(tmp_path / "data", **{"en-triplet": rows})
    model = encoder("modernbert", max_position_embeddings=8192, num_hidden_layers=1, num_attention_heads=1)
    overrides = [f"model.name_or_path={model}", f"data.name={data}", "evaluation.rows=2"]
    overrides += ["model.document_length=8192", "training.per_device_train_batch_size=2"]
    recipe = load_recipe(RECIPES / "long_documents.yaml", few_steps(tmp_path / "out", *overrides))
    assert recipe.training.gradient_checkpointing
    features = load_model(recipe.model, "cpu", seed=0).tokenize([rows[0]["positive"]], is_query=False)
    assert features["attention_mask"].sum() == 8192
    losses_both_ways("long_documents", tmp_path, *overrides)


def kd_subsets(rows: int = 24, ways: int = 5, documents: int = 60) -> dict[str, list[dict]]:
    """The three tables of a distillation data set, with ids that are not row numbers."""
    return {
        "train": [
            {
                "query_id": f"q{rows - row}",
                "document_ids": [f"d{(row * 7 + way * 11) % documents}" for way in range(ways)],
                "scores": [1.0 - way / ways - row / 100 for way in range(ways)],
            }
            for row in range(rows)
        ],
        "queries": [{"query_id": f"q{row}", "text": text(row, 5)} for row in range(rows + 1)],
        "documents": [
            {"document_id": f"d{row}", "text": f"{text(row, 2 + row % 25)} {row}"} for row in reversed(range(documents))
        ],
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_distillation_and_as_a_second_stage(family, encoder, tmp_path):
    data = hub_dataset(tmp_path / "data", **kd_subsets())
    overrides = [f"data.name={data}", "data.n_ways=4", "evaluation.rows=8"]
    losses_both_ways("colbert_kd", tmp_path / "first", f"model.name_or_path={encoder(family)}", *overrides)
    checkpoint = tmp_path / "first" / "true" / "model"
    losses_both_ways("colbert_kd", tmp_path / "second", f"model.name_or_path={checkpoint}", *overrides)
