"""The benchmark of the head: the command on a CPU."""

import json

from benchmarked import run_benchmark


def test_every_tiny_cell_is_measured_and_exact(tmp_path):
    target = tmp_path / "head.json"
    arguments = ["--shapes", "tiny", "tiny-candidates", "--entries", "fast", "einsum", "lik-fused"]
    arguments += ["--results", str(target)]
    printed = run_benchmark("operators.projection", *arguments)
    cells = json.loads(target.read_text())
    assert len(cells) == 6
    for name, cell in cells.items():
        if name.endswith("lik-fused"):
            assert "failure" in cell
            continue
        assert set(cell["errors"]) == {"scores", "query gradient", "hidden gradient", "weight gradient"}
        assert all(error < 1e-6 for error in cell["errors"].values()), name
        assert cell["forward"]["ms"] > 0 and cell["forward_backward"]["ms"] > 0
    assert "times faster than the best unfused peer" in printed
    before = target.read_text()
    run_benchmark("operators.projection", *arguments, "--render-only")
    assert target.read_text() == before
