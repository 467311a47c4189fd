"""The calls of a warm-up launch every program that batches of the same sizes launch."""

import random
import subprocess
import sys

import pytest
import torch

from pylate_fastmaxsim import warmup
from pylate_fastmaxsim.precompile import calls, shapes
from tests.support.recorded_launches import recorded_launches
from tests.support.scored_batches import ON_GPU, SHAPES, score

pytest.importorskip("triton")
CPU = torch.device("cpu")


@pytest.mark.parametrize("architecture", [80, 90])
@pytest.mark.parametrize("shape", SHAPES, ids=range(len(SHAPES)))
def test_batches_of_the_same_sizes_launch_nothing_else(shape, architecture):
    with recorded_launches(architecture) as ready:
        for call in shapes.calls_of(shape):
            calls.run(call, CPU)
    draw = random.Random(0)
    torch.manual_seed(0)
    for _ in range(12):
        with recorded_launches(architecture) as launched:
            score(shape, draw, "cpu")
        assert launched and launched <= ready, sorted({name for name, *_ in launched - ready})


@pytest.mark.cuda
def test_on_a_gpu_batches_compile_nothing_after_it(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    done = warmup(ON_GPU)
    assert done.kernels == len(list(tmp_path.rglob("*.cubin"))) > 100
    script = [sys.executable, "-m", "tests.support.scored_batches"]
    run = subprocess.run(script, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    assert run.stdout == "compiled: []\n"
    assert warmup(ON_GPU[0], processes=2).kernels == 0
