import pickle
import subprocess
import sys
from operator import attrgetter

import pytest
import torch

from pylate_fastmaxsim import BatchShape, TopK, warmup
from pylate_fastmaxsim.precompile import processes
from pylate_fastmaxsim.precompile.shapes import calls_of

SHAPE, OTHER = BatchShape(2, 3, 4, 5), BatchShape(2, 3, 4, 5, poolings=(TopK(2),), masked=("both",))


@pytest.fixture
def as_on_a_gpu(monkeypatch, tmp_path):
    """A GPU is said to be there, and a process runs the given code instead of kernels."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(processes, "require_gpu", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)

    def run(code: str) -> None:
        class Worker(subprocess.Popen):
            def __init__(self, command, **options):
                super().__init__([sys.executable, "-S", "-c", code], **options)

        monkeypatch.setattr(subprocess, "Popen", Worker)

    return run


def test_every_call_is_in_one_share(as_on_a_gpu, tmp_path, monkeypatch):
    as_on_a_gpu(
        "import os, sys\n"
        "given = sys.stdin.buffer.read()\n"
        "folder = os.path.join(os.environ['TRITON_CACHE_DIR'], str(os.getpid()))\n"
        "os.mkdir(folder)\n"
        "open(os.path.join(folder, 'kernel.cubin'), 'wb').write(given)"
    )
    monkeypatch.setattr(processes, "float32_precision", lambda dtype: "high")
    done = warmup([SHAPE, OTHER], processes=3)
    assert (done.kernels, done.processes) == (3, 3) and done.seconds > 0
    shares = [pickle.loads(file.read_bytes()) for file in tmp_path.rglob("*.cubin")]
    given = sorted(str(call) for calls, *_ in shares for call in calls)
    assert given == sorted(map(str, [*calls_of(SHAPE), *calls_of(OTHER)]))
    # What runs the same forward is in one share.
    same = attrgetter("shape", "score", "option", "queries_masked", "documents_masked")
    forwards = [{(*same(call), call.gradients is None) for call in given} for given, _, _ in shares]
    assert sum(map(len, forwards)) == len(set().union(*forwards))
    assert {precision for _, _, precision in shares} == {"high"}
    assert warmup([]).processes == 0


def test_a_process_that_fails_is_an_error_of_one_sentence(as_on_a_gpu):
    as_on_a_gpu("import sys; sys.stdin.buffer.read(); sys.exit('noise\\nCall(...): OutOfMemoryError: no memory')")
    with pytest.raises(RuntimeError, match=r"^warmup: a process .* failed: Call\(...\): OutOfMemoryError: no memory$"):
        warmup(SHAPE, processes=2)


def test_without_a_gpu_it_says_so_in_one_sentence(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="^warmup: kernels are compiled for the GPU .* no CUDA GPU here.$"):
        warmup(SHAPE)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"queries": 0}, "BatchShape: queries must be at least 1, got 0."),
        ({"dtype": torch.float64}, "BatchShape: dtype must be torch.bfloat16, torch.float16 or torch.float32, got"),
        ({"masked": "both"}, "BatchShape: masked must be a tuple of some of nothing, queries, documents, both, got 'both'"),
        ({"formats": ("int4",)}, "BatchShape: formats must be a tuple of some of int8, int8-per-token, fp8,"),
        ({"formats": ("residual-1",), "dim": 4}, "BatchShape: d * bits must be a multiple of 8 for residual-1, got d = 4."),
        ({"save_documents": "int4"}, "BatchShape: save_documents must be \"int8\" or None, got 'int4'."),
        ({"poolings": (TopK,)}, "BatchShape: pooling must be Max"),
        ({"poolings": TopK(2)}, "BatchShape: poolings must be a tuple of poolings, got TopK(k=2)."),
    ],
)  # fmt: skip
def test_a_wrong_shape_is_refused(change, said):
    with pytest.raises((ValueError, TypeError)) as error:
        BatchShape(**{"queries": 2, "query_tokens": 3, "documents": 4, "document_tokens": 5} | change)
    assert str(error.value).startswith(said)


def test_what_is_no_shape_is_refused():
    for wrong in ([3], 3):
        with pytest.raises(TypeError, match="^warmup: shapes must be BatchShapes or the file of a recipe, got int.$"):
            warmup(wrong)
