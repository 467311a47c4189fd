"""The CUDA C++ of sparse search, run on a CPU thread by thread: what it computes, without a GPU."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from tests.support.cuda_emulator import emulated_engine
from tests.support.sparse_cases import CASES, Case, blocks_of, check, check_at_least, check_order, check_removed, drawn

pytest.importorskip("triton")

from pylate_fastmaxsim.kernels.sparse import launch, postings  # noqa: E402

# Small, so that a few thousand documents are several blocks.
DOCUMENTS, THREADS = 512, 64


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    return emulated_engine(tmp_path_factory.mktemp("emulated"), DOCUMENTS, THREADS)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(postings, "DOCUMENTS_PER_BLOCK", DOCUMENTS)
    monkeypatch.setattr(launch, "DOCUMENTS_PER_BLOCK", DOCUMENTS)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_bits_are_those_of_the_definition(case, engine):
    check(case, "cpu", engine)


def test_removed_documents_are_not_found(engine):
    check_removed("cpu", engine)


def test_removing_keeps_the_postings(engine, monkeypatch):
    _, documents = drawn(Case(500, 1, 30, 12, 1))
    blocks = blocks_of(documents, "cpu", engine)
    rows = blocks._blocks[0][1:4]
    monkeypatch.setattr(launch, "make_postings", None)
    blocks.set(0, *rows, torch.zeros(500, dtype=torch.bool))
    assert blocks.search(rows[0][:9], *rows[1:], 1)[1].eq(-1).all()


def test_sums_are_in_the_order_of_terms(engine):
    check_order("cpu", engine)


def test_known_scores_lose_nothing(engine):
    check_at_least("cpu", engine)


@pytest.mark.parametrize(
    "case, scans",
    [
        (Case(9000, 2, 300, 20, 10), [8, 10]),
        (Case(9000, 2, 60, 20, 30, "rising"), 2 * [8, 10]),
        (CASES["equal scores in masses"], [*2 * [8, 10], *18 * [1]]),
    ],
    ids=["room for all", "a higher threshold", "block by block"],
)
def test_candidates_that_are_lost_are_found_again(case, scans, engine, monkeypatch):
    """Each way out of a buffer that runs over is taken, and finds the same."""
    monkeypatch.setattr(launch, "ROOM", 0)
    made = []
    scan = engine.scan
    monkeypatch.setattr(engine, "scan", lambda *call: (made.append(len(call[1])), scan(*call)))
    check(case, "cpu", engine)
    assert made == scans


def test_there_is_room_for_no_more_than_all_documents(engine, monkeypatch):
    made, prepare = [], engine.prepare
    monkeypatch.setattr(engine, "prepare", lambda *call: (made.append(call[3].capacity), prepare(*call)))
    check(CASES["more than there are"], "cpu", engine)
    assert made == [2 * DOCUMENTS]


def test_queries_in_parts_are_those_at_once(engine, monkeypatch):
    monkeypatch.setattr(launch, "STATE_BYTES", 0)
    check(CASES["plain"], "cpu", engine)


def test_postings_bound_weights_from_above():
    case = Case(500, 1, 30, 12, 1, "wide")
    _, documents = drawn(case)
    made = postings.make_postings(documents.offsets, documents.terms, documents.weights, case.vocabulary)
    lists = torch.arange(case.vocabulary).repeat_interleave(made.starts.diff() * postings.UNIT)
    there = made.impacts > 0
    rows = torch.zeros(len(documents), case.vocabulary, dtype=torch.float64)
    rows[torch.arange(len(documents)).repeat_interleave(documents.offsets.diff()), documents.terms.long()] = (
        documents.weights.double()
    )
    weights = rows[made.ids.int()[there], lists[there]]
    steps = made.scales.double()[lists[there]]
    assert int(there.sum()) == int((weights > 0).sum()) == documents.terms.numel()
    assert bool((weights <= made.impacts[there] * steps).all())
    assert bool((weights > (made.impacts[there].double() - 1 - 1e-6) * steps).all())


class _Unknown:
    """Kernels for a GPU that NVRTC does not know."""

    def __init__(self, *_):
        pass

    def compile(self, device):
        raise RuntimeError("NVRTC cannot compile search.cu (NVRTC_ERROR_INVALID_OPTION): unknown\narchitecture")


@pytest.mark.parametrize(
    ("module", "reason"),
    [(None, "import of .* halted"), (SimpleNamespace(CudaKernels=_Unknown), "NVRTC cannot compile .* unknown")],
    ids=["no bindings", "unknown GPU"],
)
def test_kernels_that_cannot_be_compiled_are_an_error_of_one_sentence(module, reason, monkeypatch):
    monkeypatch.setitem(sys.modules, "pylate_fastmaxsim.kernels.runtime.nvrtc", module)
    launch._engine.cache_clear()
    with pytest.raises(
        ImportError, match=rf"^sparse search: .*\({reason}.*\); run `pip install cuda-bindings`, [^\n]*$"
    ):
        launch.DeviceBlocks(30, "cuda")
