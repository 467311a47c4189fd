"""The benchmark of the head: the command on a CPU."""

import json
import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


def test_every_tiny_cell_is_measured_and_exact(tmp_path):
    target = tmp_path / "head.json"
    arguments = ["--shapes", "tiny", "tiny-candidates", "--entries", "fast", "einsum", "lik-fused"]
    command = [sys.executable, str(BENCHMARKS / "head.py"), *arguments, "--results", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    cells = json.loads(target.read_text())
    assert len(cells) == 6
    for name, cell in cells.items():
        if name.endswith("lik-fused"):
            assert "failure" in cell
            continue
        assert set(cell["errors"]) == {"scores", "query gradient", "hidden gradient", "weight gradient"}
        assert all(error < 1e-6 for error in cell["errors"].values()), name
        assert cell["forward"]["ms"] > 0 and cell["forward_backward"]["ms"] > 0
    assert "times faster than the best unfused peer" in done.stdout
    before = target.read_text()
    again = subprocess.run([*command, "--render-only"], capture_output=True, text=True, timeout=300)
    assert again.returncode == 0 and target.read_text() == before
