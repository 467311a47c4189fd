"""The recipes that come with the package: all are valid, and each trains on stand-ins of the model and data it names."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pylate_fastmaxsim.integrations.pylate.static import token_vectors
from pylate_fastmaxsim.recipes.config.kinds import ColBERTSection
from pylate_fastmaxsim.recipes.evaluation.evaluate import collection_of
from pylate_fastmaxsim.recipes.load import dump_recipe, load_recipe
from pylate_fastmaxsim.recipes.mining.mine import mine
from pylate_fastmaxsim.recipes.models.load import load_model
from pylate_fastmaxsim.recipes.training.inputs import load_data
from pylate_fastmaxsim.recipes.training.train import train
from tests.support import models
from tests.support.mining_recipe import answers, write_pairs
from tests.support.paths import RECIPES
from tests.support.tiny_recipe import few_steps, hub_dataset, kd_subsets, text


@pytest.mark.parametrize("name", sorted(path.stem for path in RECIPES.glob("*.yaml")))
def test_they_are_valid_and_survive_a_round_trip(name, tmp_path):
    recipe = load_recipe(RECIPES / f"{name}.yaml")
    (tmp_path / "dumped.yaml").write_text(dump_recipe(recipe))
    assert load_recipe(tmp_path / "dumped.yaml") == recipe
    assert recipe.name == name and not recipe.model.trust_remote_code


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


@pytest.mark.e2e
def test_msmarco(encoder, tmp_path, caplog):
    rows = [{"query": text(i, 5), "positive": text(i, 9), "negative": text(i + 1, 30)} for i in range(40)]
    data = hub_dataset(tmp_path / "data", triplet=rows)
    overrides = [f"model.name_or_path={encoder('bert')}", f"data.name={data}", "evaluation.rows=8"]
    losses_both_ways("colbert_msmarco", tmp_path, *overrides)
    # The recipe's dropouts are those of ModernBERT.
    (said,) = [line for line in caplog.messages if line.startswith("model.config_kwargs is left out where ")]
    assert said.endswith("no such value: embedding_dropout, attention_dropout, mlp_dropout.")
    recipe = load_recipe(RECIPES / "colbert_msmarco.yaml", few_steps(tmp_path / "out", *overrides))
    held_out = load_data(recipe).held_out
    assert held_out.column_names == ["query", "positive", "negative"]
    collection = collection_of(recipe, held_out)
    assert set(collection.queries.values()) == set(held_out["query"])
    assert set(collection.corpus["text"]) == {*held_out["positive"], *held_out["negative"]}


@pytest.mark.e2e
def test_gradcache(encoder, tmp_path):
    rows = [{"query": text(i, 5), "document": text(i, 3 + i % 20), "dataset": "gooaq", "shard": 0} for i in range(40)]
    data = hub_dataset(tmp_path / "data", gooaq=rows)
    overrides = [f"model.name_or_path={encoder('modernbert')}", f"data.name={data}", "evaluation.rows=8"]
    overrides += ["data.config=gooaq", "data.split=train"]
    cached = losses_both_ways("colbert_gradcache", tmp_path / "cached", *overrides, "loss.mini_batch_size=3")
    overrides.append("loss={name: contrastive, temperature: 0.02}")
    assert losses_both_ways("colbert_gradcache", tmp_path / "plain", *overrides) == pytest.approx(cached, rel=1e-3)


@pytest.mark.e2e
def test_long_documents(encoder, tmp_path):
    # More rows are longer than 2,048 tokens, at one token a word or more, than are held out.
    lengths = (2500, 2500, 2500, 50, 50, 50)
    rows = [{"anchor": text(i, 5), "positive": text(i, n), "negative": text(i + 1, 300)} for i, n in enumerate(lengths)]
    data = hub_dataset(tmp_path / "data", **{"en-triplet": rows})
    model = encoder("modernbert", max_position_embeddings=2048, num_hidden_layers=1, num_attention_heads=1)
    overrides = [f"model.name_or_path={model}", f"data.name={data}", "evaluation.rows=2"]
    overrides += ["model.document_length=2048", "training.per_device_train_batch_size=2"]
    recipe = load_recipe(RECIPES / "long_documents.yaml", few_steps(tmp_path / "out", *overrides))
    assert recipe.training.gradient_checkpointing
    features = load_model(recipe.model, "cpu", seed=0).tokenize([rows[0]["positive"]], is_query=False)
    assert features["attention_mask"].sum() == 2048
    losses_both_ways("long_documents", tmp_path, *overrides)


@pytest.mark.e2e
def test_distillation_and_as_a_second_stage(encoder, tmp_path):
    data = hub_dataset(tmp_path / "data", **kd_subsets())
    overrides = [f"data.name={data}", "data.n_ways=4", "evaluation.rows=8"]
    losses_both_ways("colbert_kd", tmp_path / "first", f"model.name_or_path={encoder('xlm-roberta')}", *overrides)
    checkpoint = tmp_path / "first" / "true" / "model"
    losses_both_ways("colbert_kd", tmp_path / "second", f"model.name_or_path={checkpoint}", *overrides)


@pytest.mark.e2e
def test_a_token_table_is_mined_and_trained_from_its_teacher(encoder, tmp_path):
    teacher = models.load_model(encoder("bert"))
    teacher.save_pretrained(str(tmp_path / "teacher"))
    write_pairs(tmp_path / "pairs", answers())
    mining = {"pairs.name": tmp_path / "pairs", "teacher": tmp_path / "teacher", "num_negatives": 3, "range_max": 12}
    overrides = [f"mining.{key}={value}" for key, value in mining.items()]
    overrides += [f"model.token_table={tmp_path / 'teacher'}", f"data.name={tmp_path / 'mined'}", "evaluation.rows=8"]
    overrides.append("model.embedding_size=null")
    assert mine(load_recipe(RECIPES / "static_late_interaction.yaml", few_steps(tmp_path / "mining", *overrides)))[
        "rows"
    ]
    first, second = losses_both_ways("static_late_interaction", tmp_path, *overrides)
    assert second < first
    trained = load_model(ColBERTSection(name_or_path=str(tmp_path / "true" / "model")), "cpu", seed=0)
    table = token_vectors(trained)
    texts = models.sentences(8)
    for is_query in (True, False):
        for words, vectors in zip(texts, trained.encode(texts, is_query=is_query, convert_to_tensor=True), strict=True):
            ids = trained.tokenizer(words)["input_ids"]
            assert ids == teacher.tokenizer(words, add_special_tokens=False)["input_ids"]
            torch.testing.assert_close(vectors, table[ids[: len(vectors)]], atol=1e-5, rtol=0)
    # It has learned, and is not far from where it began.
    moved = (table - token_vectors(teacher)).norm(dim=1)
    assert 1e-4 < moved.max() < 0.2
