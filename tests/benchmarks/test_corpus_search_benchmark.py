"""The benchmark of corpus search: the command on a CPU."""

import json

import pytest
from benchmarked import run_benchmark

pytest.importorskip("pylate")
pytestmark = [pytest.mark.bench, pytest.mark.smoke]


def test_every_stage_is_measured_and_finds_the_same(tmp_path):
    target = tmp_path / "corpus_search.json"
    sizes = ["--passages", "400", "--queries", "3", "--dim", "16", "--mean", "20", "--k", "10"]
    shares = ["--stock-passages", "200", "--check-passages", "300"]
    places = ["--folder", str(tmp_path / "corpus"), "--output", str(target)]
    printed = run_benchmark("retrieval.corpus_search", *places, *sizes, *shares)
    content = json.loads(target.read_text())
    stages = content["stages"]
    assert list(stages) == ["write", "streamed", "resident", "stock", "stock_float32"]
    assert all(stage["seconds"] > 0 for stage in stages.values())
    assert stages["resident"]["same_as_streamed"] and stages["stock"]["passages"] == 200
    assert stages["stock_float32"]["difference"]["share_of_same_ranks"] == 1
    assert stages["stock_float32"]["difference"]["largest_score_difference"] < 1e-5
    # Stock adds up scores of some 20 in bfloat16.
    assert stages["stock"]["difference"]["largest_score_difference"] < 0.25
    assert target.with_suffix(".png").stat().st_size > 0 and "| PyLate | " in printed
