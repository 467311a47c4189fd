"""Every suite of benchmarks, run as a user runs it, on a few numbers on a CPU; its processes are copies but for one."""

import subprocess
import sys
from collections.abc import Iterator

import pytest

from benchmarks.harness.records import load
from benchmarks.harness.suite import SUITES, run_suite, suite_named
from benchmarks.harness.turns import speed
from tests.support.paths import ROOT

# Its options, how many cells it then has, and what it prints.
TINY_STEPS = "--compile no --layers 1 --different 1 --warmup 1 --batches 2 --steps"
STEPS = f"{TINY_STEPS} 1 --document-length 30"
CORPUS = "--folder {folder}/corpora --passages 400 --queries 3 --dim 16 --mean 20 --k 10 --centroids 64"
RUNS = {
    "operators": ("--shapes tiny --competitors fast einsum --only tiny/* tiny-r*", 4, "| tiny: 3 x 4 against 5 x 8"),
    "head": ("--only tiny/fast*", 2, "| tiny/fast forward_backward |"),
    "xtr": ("", 1, "| tiny fast forward_backward |"),
    "pooling_operators": ("--only */fast */ragged */einsum", 13, "| 3x8 against 5x24 | `LogSumExp(0.1)` |"),
    "splade_head": ("--only tiny/stock tiny/fast", 2, "| tiny/fast dense forward |"),
    "compressed_operators": ("--only */fast/* */naive/*", 11, "| 3x4 against 5x9 | fp8 |"),
    "train_step": (f"{STEPS} --checkpointing no --paths stock fast --ranks 2", 2, "| PyLate + pylate-fastm"),
    "lengths": (f"{STEPS} --tokens 15", 2, "| padding | PyLate |"),
    "losses": ("--queries 8 --lengths 12 --paths stock fast", 6, "| path=fast/loss=distillation/queries=1"),
    "splade_step": (f"{TINY_STEPS} 8 --hidden 64", 2, "| Sentence Transformers + pylate-fastmaxsim | "),
    "sparse_search": ("--sizes 100 --queries 4", 2, "| 100 | k = 10 |"),
    "pooling_study": ("--quick --only */M=64/*", 12, "| gradient of the score |"),
    "encode": ("--texts 70 --layers 1 --hidden 64 --only pylate/doc*/*s[t]*256", 2, "| fast bfloat16 256 |"),
    "exact_search": ("--share 0.001 --dim 16 --only fiqa/[bip]* million/add", 4, "| fiqa/bfloat16 | "),
    "token_pooling": ("--share 0.01 --only distances/* tokens/80", 3, "10 of 10 documents with equal distances have"),
    "corpus_search": (f"{CORPUS} --stock-passages 200 --check-passages 300", 16, "| PyLate |"),
}
NOT_HERE = {
    "attention": "a GPU",
    "ceilings": "a GPU, whose memory it fills",
    "long_documents": "minutes, for texts of thousands of words",
    "page_step": "colpali-engine",
    "multi_vector_step": "Sentence Transformers 6",
    "cranfield": "the collection, and an encoder of 84 MB",
    "pooled_cranfield": "the same",
    **dict.fromkeys(("static_cranfield", "first_stage_cranfield", "compressed_fidelity"), "data: test_quality.py"),
}


def test_every_suite_is_run_here_or_says_what_it_needs():
    assert RUNS.keys() | NOT_HERE.keys() == SUITES.keys()
    for name in SUITES.keys() - {"multi_vector_step"}:
        suite = suite_named(name)
        assert callable(suite.cells) and hasattr(suite, "measure") or hasattr(suite, "run"), name


@pytest.mark.bench
@pytest.mark.parametrize("name", RUNS)
def test_a_suite_measures_prints_and_goes_on(name, tmp_path, capsys, request):
    pytest.importorskip("pylate")
    if name != "operators":
        request.getfixturevalue("forked")
    given, count, shown = RUNS[name]
    target = tmp_path / f"{name}.json"
    arguments = [*given.format(folder=tmp_path).split(), "--results", str(target)]
    command = [sys.executable, "-m", "benchmarks", name, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert shown in done.stdout
    cells = load(target)["cells"]
    assert len(cells) == count and all(cell["environment"]["torch"] for cell in cells.values())
    assert not [cell for cell in cells.values() if "failure" in cell or cell.get("status", "ok") != "ok"]
    CHECKS.get(name, len)(cells)
    before = target.read_bytes()
    run_suite(name, arguments)  # measures nothing again
    assert shown in capsys.readouterr().out and target.read_bytes() == before


def all_errors(result: dict) -> Iterator[dict]:
    for key, value in result.items():
        if key == "errors":
            yield value
        elif isinstance(value, dict):
            yield from all_errors(value)


def check_errors(cells: dict[str, dict]) -> None:
    """Ours round vectors and gradients to bfloat16 once; bfloat16 similarities of the others choose other tokens."""
    for name, cell in cells.items():
        others = {"einsum", "stock", "naive"} & {*name.split("/")}
        for first, *gradients in (each.values() for each in all_errors(cell)):
            assert first < (1e-2 if others else 1e-6), (name, cell)
            # Compressed documents have the error of compression here: two bits of 32 numbers are coarse.
            bound = 0.5 if "residual" in name else 0.3 if others else 0.03
            assert gradients and max(gradients) < bound, (name, cell)


def check_losses(cells: dict[str, dict]) -> None:
    for name, cell in cells.items():
        # Stock's scores are rounded to bfloat16, and divided by a temperature of 0.02.
        assert cell["loss_value"] == pytest.approx(cells[name.replace("fast", "stock")]["loss_value"], rel=0.05)


def check_turns(cells: dict[str, dict]) -> None:
    stock, fast = cells.values()
    assert stock["losses"][0] == pytest.approx(fast["losses"][0], rel=2e-2) and 0 < stock["padding"] < 1
    # By turns: 2 steps of warm-up, and two blocks of 3.
    assert stock["turns"] == fast["turns"] and fast["against_first"]["pairs"] == 2 and len(fast["each_ms"]) == 8
    assert speed(fast, stock)


def check_step_of_ranks(cells: dict[str, dict]) -> None:
    stock, fast = cells.values()
    # Stock rounds scores, which a temperature of 0.02 divides, to bfloat16.
    assert stock["losses"][0] == pytest.approx(fast["losses"][0], rel=0.2)
    assert fast["ranks"] == 2 and fast["steps"] == len(fast["each_ms"]) == 1


def check_sparse(cells: dict[str, dict]) -> None:
    found = {f"{name}/{key}": each for name, cell in cells.items() for key, each in cell["measured"].items()}
    for name in ("100/index/one", "cpu/100/index/k=1000"):
        assert found[name]["exact"] and found[name]["repeatable"], name
    assert found["100/cusparse/k=10"]["recall"] > 0.99


def check_exact(cells: dict[str, dict]) -> None:
    recalls = [cells[f"fiqa/{name}"]["recall"] for name in ("bfloat16", "pylate")]
    assert recalls == [1, pytest.approx(1, abs=0.1)] and cells["fiqa/int8"]["recall"] > 0.9


def check_corpus(cells: dict[str, dict]) -> None:
    formats = ("bf16", "int8", "fp8", "residual-4", "residual-2")
    for name in formats[1:]:
        shares = [cells[f"{name}/{way}"]["difference"]["share_of_same_passages"] for way in ("streamed", "rescored")]
        assert 0.3 < shares[0] <= 1 and shares[1] >= shares[0], name
    sizes = [cells[f"{name}/write"]["bytes"] for name in formats]
    assert sizes == sorted(sizes, reverse=True)
    exact, rounded = (cells[name]["difference"] for name in ("stock_float32", "stock"))
    assert exact["share_of_same_ranks"] == 1 and exact["largest_score_difference"] < 1e-5
    # Stock adds up scores of some 20 in bfloat16.
    assert rounded["largest_score_difference"] < 0.25


CHECKS = {
    **dict.fromkeys(("operators", "head", "pooling_operators", "splade_head", "compressed_operators"), check_errors),
    "losses": check_losses,
    "train_step": check_step_of_ranks,
    "splade_step": check_turns,
    "sparse_search": check_sparse,
    "corpus_search": check_corpus,
    "exact_search": check_exact,
}
