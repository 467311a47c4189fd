"""The CUDA C++ of sparse search, run on a CPU thread by thread and on a GPU, against the definition."""

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
def compiled(tmp_path_factory):
    return emulated_engine(tmp_path_factory.mktemp("emulated"), DOCUMENTS, THREADS)


@pytest.fixture
def engine(compiled, monkeypatch):
    monkeypatch.setattr(postings, "DOCUMENTS_PER_BLOCK", DOCUMENTS)
    monkeypatch.setattr(launch, "DOCUMENTS_PER_BLOCK", DOCUMENTS)
    return compiled


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_bits_are_those_of_the_definition(case, engine):
    check(case, "cpu", engine)


def test_removed_documents_known_scores_and_order(engine):
    check_removed("cpu", engine)
    check_at_least("cpu", engine)
    check_order("cpu", engine)


def test_removing_keeps_the_postings(engine, monkeypatch):
    _, documents = drawn(Case(500, 1, 30, 12, 1))
    blocks = blocks_of(documents, "cpu", engine)
    rows = blocks._blocks[0][1:4]  # the very tensors, by which a block knows that its documents stayed
    monkeypatch.setattr(launch, "make_postings", None)
    blocks.set(0, *rows, torch.zeros(500, dtype=torch.bool))
    assert blocks.search(rows[0][:9], *rows[1:], 1)[1].eq(-1).all()


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
    launch._engine.cache_clear()  # a test before may have compiled for this device
    with pytest.raises(
        ImportError, match=rf"^sparse search: .*\({reason}.*\); run `pip install cuda-bindings`, [^\n]*$"
    ):
        launch.DeviceBlocks(30, "cuda")


# Blocks are of 16,384 documents here.
LARGE = {
    "several blocks": Case(60_000, 20, 500, 30, 100),
    "equal scores in masses": Case(150_000, 3, 3, 2, 7, "equal", everywhere=True),
    "wide vocabulary": Case(20_000, 5, 250_000, 60, 50, dtype=torch.float16),
    "deep": Case(40_000, 3, 300, 30, 4096),
}


@pytest.mark.cuda
@pytest.mark.parametrize(
    "case", [*CASES.values(), *LARGE.values()], ids=[*CASES, *(f"large, {name}" for name in LARGE)]
)
def test_bits_on_a_gpu(case):
    check(case, "cuda", None)


@pytest.mark.cuda
def test_on_a_gpu(monkeypatch):
    check_removed("cuda", None)
    check_at_least("cuda", None)
    check_order("cuda", None)
    monkeypatch.setattr(launch, "ROOM", 0)
    for case in (Case(150_000, 4, 60, 20, 300, "rising"), LARGE["equal scores in masses"]):
        check(case, "cuda", None)


@pytest.mark.cuda
def test_the_same_bits_every_time_and_for_any_batch():
    case = LARGE["several blocks"]
    queries, documents = drawn(case)
    blocks = blocks_of(documents, "cuda", None)
    own = queries.to("cuda")
    first = blocks.search(own.offsets, own.terms, own.weights, case.k)
    for _ in range(5):
        assert all(map(torch.equal, first, blocks.search(own.offsets, own.terms, own.weights, case.k)))
    for query in range(len(queries)):
        one = queries.select(torch.tensor([query])).to("cuda")
        alone = blocks.search(one.offsets, one.terms, one.weights, case.k)
        assert all(torch.equal(row[query], single[0]) for row, single in zip(first, alone, strict=True))
