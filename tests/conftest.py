import gc
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest

# datasets tells the Hub of each local file that it loads, and waits for seconds where that is out of reach.
os.environ.setdefault("HF_UPDATE_DOWNLOAD_COUNTS", "0")
# What a child writes to stderr is counted; the line of enable() has tests of its own.
os.environ.setdefault("PYLATE_FASTMAXSIM_QUIET", "1")
# Of what Inductor compiles the numbers are tested; looking for vector instructions would take most of its time.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")
# Processes that tests start import tests.support as well.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH"))))
if workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 0)):
    # Before torch is imported, and for the processes that tests start: each worker has its share of the cores.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // workers)))

import torch

# No MultiVectorEncoder before Sentence Transformers 6, which PyLate cannot be installed beside.
host = find_spec("sentence_transformers")
if host is None or not Path(host.origin).with_name("multi_vector_encoder").exists():
    collect_ignore_glob = ["*/test_multi_vector*.py"]

# Files of a minute and more. They start first, so that no worker is left with one when the others have ended.
LONG = """operators compile suites modernbert_layers kinds compare launched mining_launched train compiled_distributed
compiled_checkpointing gathered smoke encode_distributed host_ranks host_losses script graphs"""
ORDER = [f"test_{name}.py" for name in LONG.split()]


def pytest_configure(config: pytest.Config) -> None:
    # pytest-xdist would start with the files that have the most tests.
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False
    # A shell's background jobs ignore Ctrl-C, and so would every process that a test starts and interrupts.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: ORDER.index(item.path.name) if item.path.name in ORDER else len(ORDER))
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("cuda"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


@pytest.fixture(scope="module", autouse=True)
def _looked_through() -> None:
    # What is there by now stays, and transformers, torch and fast-plaid ask again and again to look through it for garbage.
    gc.collect()
    gc.freeze()


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python commands of the test are copies of a process that has imported other packages: tests/support/forked.py.

    Not where a new process is what is tested, and not with CUDA, which a copy cannot use.
    """
    from tests.support import forked

    if sys.platform == "linux" and not torch.cuda.is_available():
        forked.serve()
        monkeypatch.setattr(subprocess, "Popen", forked.Forked)


@pytest.fixture(scope="session")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """``encoder(family, **changes)``: the folder of a tiny encoder, built once per session."""
    from tests.support.models import build_model

    built: dict[tuple, str] = {}

    def folder(family: str, **changes: object) -> str:
        key = (family, *sorted(changes.items()))
        if key not in built:
            built[key] = build_model(tmp_path_factory.mktemp(family), family, **changes)
        return built[key]

    return folder


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[str]]:
    """What each of ``RANKS`` processes (or by a parameter: how many, backend) said of the module's ``CASES``."""
    from tests.support.ranks import run_cases

    ranks, *backend = getattr(request, "param", None) or [request.module.RANKS]
    return run_cases(request.module.__name__, ranks, tmp_path_factory.mktemp("ranks"), *backend)


@pytest.fixture
def model(encoder: Callable[..., str]):
    """A tiny ColBERT in float64."""
    from tests.support.models import load_model

    return load_model(encoder("modernbert")).double()


@pytest.fixture(autouse=True)
def _nothing_left_behind():
    """Whatever a test enabled is off again for the next one."""
    yield
    if "pylate_fastmaxsim.integrations.enable" in sys.modules:
        from pylate_fastmaxsim.integrations import log
        from pylate_fastmaxsim.integrations.enable import disable
        from pylate_fastmaxsim.integrations.encoding import encode as encoding_encode

        disable()
        encoding_encode.release()
        log.reset_log_once()


@pytest.fixture(params=["grouped", "packed"])
def mode(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to encode without padding, the packed one with an attention that runs anywhere."""
    if request.param == "packed":
        request.getfixturevalue("packed")
    return request.param


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> None:
    from pylate_fastmaxsim.integrations.encoding import attention as encoding_attention
    from tests.support.models import attend_to_own_document

    monkeypatch.setattr(encoding_attention, "variable_length_attention", attend_to_own_document)


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled layers run as they were traced: compiling them for a CPU takes longer and is not what is tested."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))


@pytest.fixture
def no_search(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Call it to have any search for attended tokens fail from then on that would wait for a device."""
    from pylate_fastmaxsim.integrations.encoding import batch as encoding_batch

    attended_index = encoding_batch.attended_index

    def known(mask, total=None):
        assert total is not None, "counted the attended tokens that the collator had counted"
        return attended_index(mask, total)

    return lambda: monkeypatch.setattr(encoding_batch, "attended_index", known)
