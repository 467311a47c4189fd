"""Of the benchmarks: files of results, the clock of a GPU, errors, and what becomes of a process that fails or hangs."""

import json
import time
from argparse import ArgumentParser
from unittest import mock

import pytest
import torch

from benchmarks.harness.records import Results, load, write
from benchmarks.harness.suite import add_options
from benchmarks.harness.timing import time_calls
from benchmarks.harness.workers import Worker
from benchmarks.operators.measure import errors


@pytest.fixture
def results(tmp_path):
    """``results(*arguments)``: the results file of a command that was given them."""
    file = tmp_path / "results.json"
    file.write_text(json.dumps({"cells": {"known": {"status": "ok"}, "broken": {"status": "failed"}}}))
    parser = ArgumentParser()
    add_options(parser, file, timeout=1)
    return lambda *arguments: Results(parser.parse_args(arguments))


def test_missing_and_failed_cells_are_measured_and_written_at_once(results, tmp_path):
    assert [name for name in ("known", "broken", "new") if results().wants(name)] == ["broken", "new"]
    assert results("--again").wants("known")
    results().add("new", {"status": "ok"})
    results("--output", str(tmp_path / "other.json")).add("newer", {"status": "ok"})
    written = [[*load(tmp_path / f"{name}.json")["cells"]] for name in ("results", "other")]
    assert written[0] == ["known", "broken", "new"] and "newer" in written[1]


def test_a_file_has_each_environment_once_and_gives_it_to_every_cell(tmp_path):
    first, second = {"device": "H100"}, {"device": "H200"}
    made = {"a": first, "b": second, "c": first}
    write(tmp_path / "a.json", {"cells": {name: {"environment": of, "ms": 1.23456789} for name, of in made.items()}})
    assert (tmp_path / "a.json").read_text().count("H100") == 1
    found = load(tmp_path / "a.json")["cells"]
    assert {name: cell["environment"] for name, cell in found.items()} == made and found["a"]["ms"] == 1.23457


def test_calls_are_timed_again_if_the_gpu_waited_for_the_host(monkeypatch):
    slept, calls = [], []
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: mock.Mock(**{"elapsed_time.return_value": 1.0}))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: slept.append(cycles / 2e9))

    def call():
        calls.append(None)
        if len(calls) == 10:  # the sixth of the first round
            time.sleep(0.02)

    found = time_calls([call], torch.device("cuda"))
    assert len(slept) == 2 and slept[1] > 0.02 > slept[0]
    assert len(calls) == 3 + 1 + 2 * 25 and found["iterations"] == 25 and found["host_ms"] < 20


def test_wrong_scores_and_gradients_are_errors():
    torch.manual_seed(0)
    leaf = torch.rand(4, 5, requires_grad=True)
    few = (torch.tensor([[0], [3]]), torch.tensor([1, 4]))

    def found(scores: torch.Tensor) -> dict:
        return errors(scores, {"own": leaf}, lambda exact: (2 * exact[0])[few], few)

    assert found(2 * leaf) == {"scores": pytest.approx(0, abs=1e-6), "own gradient": pytest.approx(0, abs=1e-6)}
    assert found(4 * leaf) == {"scores": pytest.approx(1), "own gradient": pytest.approx(1)}
    # A gradient beside the pairs that have one.
    assert found(2 * leaf + leaf.sum())["own gradient"] > 0.1
    assert found(leaf * torch.nan)["scores"] is None
    assert found((2 * leaf).detach()).keys() == {"scores"}


# Stands for a benchmark's process: does what the cell says.
PROGRAM = """
import os, sys, time
from benchmarks.harness.workers import serve

def answer(cell):
    if "sleep" in cell:
        time.sleep(cell["sleep"])
    if "exit" in cell:
        print("RuntimeError: CUDA error: misaligned address\\nframe #0: start", file=sys.stderr, flush=True)
        os._exit(cell["exit"])
    if "raise" in cell:
        raise ValueError(cell["raise"])
    print("not an answer")
    return {"process": os.getpid()}

serve(answer)
"""


@pytest.fixture
def worker(tmp_path, monkeypatch):
    monkeypatch.setattr(Worker, "GRACE", 0.5)
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    with Worker([str(program)], timeout=120) as worker:
        yield worker
    assert worker.process.poll() is not None


@pytest.mark.bench
def test_a_cell_that_raises_or_ends_its_process_is_a_result(worker):
    first = worker.ask({})
    assert worker.ask({"raise": "no such shape"}) == {"failure": "ValueError: no such shape"}
    assert worker.ask({}) == first
    sentence = "the process ended with status 3: RuntimeError: CUDA error: misaligned address"
    assert worker.ask({"exit": 3}) == {"failure": sentence}
    assert worker.ask({})["process"] != first["process"]


@pytest.mark.bench
def test_a_cell_that_takes_too_long_is_a_result_and_a_process_at_work_ends_with_its_worker(worker):
    worker.start()
    worker.timeout = 0.5
    assert worker.ask({"sleep": 60}) == {"failure": "not finished in 0.5 s"}
    worker.timeout = 120
    assert worker.ask({}).keys() == {"process"}
    worker.process.stdin.write('{"sleep": 60}\n')
    worker.process.stdin.flush()  # the fixture checks that it ended
