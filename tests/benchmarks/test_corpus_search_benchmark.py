"""The benchmark of corpus search: the command on a CPU."""

import json

import pytest
from benchmarked import run_benchmark

pytest.importorskip("pylate")
pytestmark = [pytest.mark.bench, pytest.mark.smoke]


def test_every_stage_of_every_format_is_measured(tmp_path):
    target = tmp_path / "corpus_search.json"
    sizes = ["--passages", "400", "--queries", "3", "--dim", "16", "--mean", "20", "--k", "10", "--centroids", "64"]
    shares = ["--stock-passages", "200", "--check-passages", "300"]
    places = ["--folder", str(tmp_path / "corpora"), "--output", str(target)]
    printed = run_benchmark("retrieval.corpus_search", *places, *sizes, *shares)
    content = json.loads(target.read_text())
    stages, formats = content["stages"], content["formats"]
    assert list(formats) == ["bf16", "int8", "fp8", "residual-4", "residual-2"]
    assert list(stages) == ["stock", "stock_float32"] and list(formats["bf16"]) == ["write", "streamed", "resident"]
    assert list(formats["residual-2"]) == ["train", "write", "streamed", "resident", "rescored"]
    assert all(each["seconds"] > 0 for found in (stages, *formats.values()) for each in found.values())
    assert (
        all(found["resident"]["same_as_streamed"] for found in formats.values()) and stages["stock"]["passages"] == 200
    )
    for name, found in formats.items():
        if name != "bf16":
            kept, rescored = (found[path]["difference"]["share_of_same_passages"] for path in ("streamed", "rescored"))
            assert 0.3 < kept <= 1 and rescored >= kept, name
    sizes = [found["write"]["bytes"] for found in formats.values()]
    assert sizes == sorted(sizes, reverse=True)
    assert stages["stock_float32"]["difference"]["share_of_same_ranks"] == 1
    assert stages["stock_float32"]["difference"]["largest_score_difference"] < 1e-5
    # Stock adds up scores of some 20 in bfloat16.
    assert stages["stock"]["difference"]["largest_score_difference"] < 0.25
    assert target.with_suffix(".png").stat().st_size > 0 and "| PyLate | " in printed
    again = run_benchmark("retrieval.corpus_search", "--output", str(target), "--render-only")
    assert again.strip() in printed
