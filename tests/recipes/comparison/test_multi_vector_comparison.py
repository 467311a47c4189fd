"""``fastmaxsim compare`` of a MultiVectorEncoder: stock and fast really run, and their tokens are counted."""

from __future__ import annotations

import json

import pytest

from tests.support.multi_vector_recipe import tiny_multi_vector
from tests.support.recipe_runs import command
from tests.support.tiny_recipe import write


@pytest.mark.e2e
def test_a_comparison_counts_the_tokens_of_both(tmp_path):
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
