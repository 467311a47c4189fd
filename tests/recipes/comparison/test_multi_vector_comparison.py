"""``fastmaxsim compare`` of a MultiVectorEncoder: stock and fast really run, and their tokens are counted."""

from __future__ import annotations

import json

import pytest
from multi_vector_recipe import tiny_multi_vector
from recipe_runs import command
from tiny_recipe import write

from pylate_fastmaxsim.comparison.report import flash_sentence
from pylate_fastmaxsim.recipes.comparison import compare, flash
from pylate_fastmaxsim.recipes.load import load_recipe
from pylate_fastmaxsim.recipes.training.prepare import prepare


@pytest.mark.e2e
def test_a_comparison_counts_the_tokens_of_both_and_says_why_there_is_no_third_way(tmp_path):
    done = command("compare", write(tmp_path, tiny_multi_vector(tmp_path, training={"max_steps": 8})))
    assert done.exit_code == 0, done.output
    comparison = json.loads((tmp_path / "out" / "compare.json").read_text())
    stock, fast = comparison["runs"]["stock"], comparison["runs"]["fast"]
    for run in (stock, fast):
        assert run["status"] == "finished" and run["steps"] == 8 and 0 < run["ndcg@10"] <= 1
        assert run["documents_per_second"] > 0 and 0 <= run["padding"] < 1
        assert all(seconds > 0 for seconds in run["phases"].values())
    assert stock["padding"] > 2 * fast["padding"] and comparison["summary"]["largest_loss_difference"] < 1e-4
    assert stock["tokens_per_step"]["documents"] == fast["tokens_per_step"]["documents"]
    sentence = "Stock with flash_attention_2 is not compared: it needs a GPU."
    assert sentence in done.output and sentence in (tmp_path / "out" / "compare.html").read_text()


@pytest.mark.e2e
def test_stock_with_another_attention_is_a_third_way(tmp_path, monkeypatch):
    # In place of FlashAttention 2, which is not there.
    monkeypatch.setattr(flash, "ATTENTION", "eager")
    monkeypatch.setattr(flash, "why_not", lambda recipe: None)
    recipe = prepare(load_recipe(write(tmp_path, tiny_multi_vector(tmp_path, training={"max_steps": 6}))))
    found = compare._beside_flash_attention(recipe, tmp_path, lambda progress: None)
    assert {run["status"] for run in found["runs"].values()} == {"finished"}
    stock, fast = ((tmp_path / f"{name}.yaml").read_text() for name in ("eager", "fast beside eager"))
    assert "attn_implementation: eager" in stock and "attn_implementation: null" in fast
    assert flash_sentence(found).startswith("Stock with flash_attention_2 takes ")


def test_a_third_way_that_fails_is_said(tmp_path, monkeypatch):
    def failing(*arguments, **options):
        raise compare.RunFailed("The flash_attention_2 run failed: no kernel")

    monkeypatch.setattr(flash, "why_not", lambda recipe: None)
    monkeypatch.setattr(compare, "_run", failing)
    found = compare._beside_flash_attention(load_recipe(write(tmp_path, tiny_multi_vector(tmp_path))), tmp_path, None)
    assert flash_sentence(found).endswith("is not compared: The flash_attention_2 run failed: no kernel.")


def test_a_recipe_that_names_its_attention_is_compared_with_that(tmp_path):
    recipe = write(tmp_path, tiny_multi_vector(tmp_path))
    assert flash.is_asked_for(load_recipe(recipe))
    assert not flash.is_asked_for(load_recipe(recipe, ["model.attn_implementation=sdpa"]))
