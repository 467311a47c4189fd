"""Exact top-k of sparse inner products on a GPU, without a matrix of scores.

Documents lie in blocks of 16,384. For a query and a block, integer sums of rounded-up factors and impacts bound the inner
products from above. Blocks are scanned in waves that grow. A histogram of the sums gives a threshold that k documents are
known to reach, and only sums above it, less what rounding can have cost, become candidates. Candidates that are left are
scored exactly from the rows. A buffer that runs over loses candidates of its query only; the query is scanned again
with the threshold that it had at the end, and if that is not enough (more equal scores than the buffer holds), block by
block.
"""

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from pylate_fastmaxsim.kernels.runtime.tensors import on_device_of
from pylate_fastmaxsim.kernels.sparse.cuda_engine import (
    SOURCE,
    CudaEngine,
    Queries,
    State,
    Tables,
    definitions,
)
from pylate_fastmaxsim.kernels.sparse.postings import DOCUMENTS_PER_BLOCK, Postings, make_postings

# Memory of a search beyond the index. What else it needs is small beside it.
STATE_BYTES = 384 << 20
# Blocks that give the first threshold, and how a wave grows beside all that was scanned before it.
SAMPLE_BLOCKS = 2
GROWTH = 4
# Candidates that a query has room for, times k. A wave brings some multiple of GROWTH times k.
ROOM = 32


class DeviceBlocks:
    """Blocks of documents on one GPU, with their postings and exact rows.

    The document ``i`` of block ``b`` has position ``b * DOCUMENTS_PER_BLOCK + i``. ``engine`` is an emulated one in tests, by
    default the CUDA C++ of this package; ImportError where that cannot be compiled: ``cuda.bindings`` or NVRTC is missing.
    """

    def __init__(self, vocabulary: int, device: torch.device | str, engine: CudaEngine | None = None):
        self.vocabulary = vocabulary
        self.device = torch.device(device)
        self._engine = _engine(self.device) if engine is None else engine
        self._blocks: dict[int, tuple[Postings, Tensor, Tensor, Tensor, Tensor | None]] = {}
        self._top_scales = torch.zeros(vocabulary, device=self.device)
        # Made again after a block has changed: addresses, and the numbers of the blocks of each wave and sample. Copying
        # them for each search would wait for the GPU.
        self._tables: Tables | None = None
        self._waves: list[Tensor] = []
        self._samples: dict[int, Tensor] = {}
        self._wide: tuple[bool, bool] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of postings and rows."""
        return sum(each.nbytes for block in self._blocks.values() for each in block if each is not None)

    def set(self, block: int, offsets: Tensor, terms: Tensor, weights: Tensor, live: Tensor | None = None) -> None:
        """Replace a block of up to ``DOCUMENTS_PER_BLOCK`` rows, or add the next. Rows are kept, not copied.

        Rows lie back to back on the device: ``offsets`` int64 ``[n + 1]``, ``terms`` int32 or uint16 ``[P]`` ascending in each
        row, ``weights`` positive float32 or float16 ``[P]``, of the same dtypes in all blocks. ``live``: documents that are not
        removed, bool ``[n]``, or None for all.
        """
        held = self._blocks.get(block)
        if held is not None and held[2] is terms and held[3] is weights:  # only `live` is new
            postings = held[0]
        else:
            postings = make_postings(offsets, terms, weights, self.vocabulary)
        if live is not None:  # a scan asks about whole groups of documents
            live = torch.nn.functional.pad(live, (0, DOCUMENTS_PER_BLOCK - live.numel()))
        self._blocks[block] = (postings, offsets, terms, weights, live)
        self._wide = (terms.dtype == torch.int32, weights.dtype == torch.float32)
        torch.maximum(self._top_scales, postings.scales, out=self._top_scales)
        self._tables = None
        self._waves, self._samples = [], {}

    def search(
        self, offsets: Tensor, terms: Tensor, weights: Tensor, k: int, at_least: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Scores and positions of the ``k`` documents with the largest inner products for each query.

        Queries are sparse rows as in :meth:`set`, on the device. ``at_least``: scores that ``k`` documents elsewhere are known to
        reach, ``[Nq]`` float32; what lies below may be left out. Scores are ``[Nq, k]`` float32, the largest first, of equal ones
        the lower position, positions int64; 0 and -1 where there is no document.
        """
        queries = Queries(offsets, terms.int(), weights.float())
        if not self._blocks or not terms.numel():
            scores = torch.zeros(len(queries), k, device=self.device)
            return scores, torch.full_like(scores, -1, dtype=torch.int64)
        # No scan finds more than there are, and kernels count candidates in 31 bits.
        capacity = min(max(ROOM * k, DOCUMENTS_PER_BLOCK), DOCUMENTS_PER_BLOCK * len(self._blocks))
        part = max(1, STATE_BYTES // State.bytes_of_query(capacity))
        found = []
        with on_device_of(offsets):
            for first in range(0, len(queries), part):
                own = Queries(offsets[first : first + part + 1], *queries[1:])
                known = None if at_least is None else at_least[first : first + part].contiguous()
                found.append(self._engine.unpack(self._best(own, k, capacity, known), k))
        if len(found) == 1:
            return found[0]
        scores, positions = zip(*found, strict=True)
        return torch.cat(scores), torch.cat(positions)

    def _best(self, queries: Queries, k: int, capacity: int, at_least: Tensor | None) -> Tensor:
        """Keys of the best documents, ``[Nq, up to k]``, int64, the largest first; 0 where there is none."""
        engine = self._engine
        state = State.of(len(queries), capacity, self.device)
        everyone = torch.arange(len(queries), dtype=torch.int32, device=self.device)
        engine.prepare(queries, self._top_scales, at_least, state)
        if at_least is None and len(self._blocks) > 1:
            engine.count(self._of_blocks(), self._sample(k), queries, everyone, state)
            engine.raise_thresholds(everyone, state, k, restart=True)
        lost, width = self._scan(everyone, queries, state, k)
        if lost:
            again = self._restarted(lost, state)
            lost, more = self._scan(again, queries, state, k)
            width = max(width, more)
        if lost:
            hard = self._restarted(lost, state)
        keys = self._rescored(queries, everyone, state, width, k)
        if lost:
            best = self._block_by_block(hard, queries, state, k)
            keys = torch.nn.functional.pad(keys, (0, max(0, best.shape[1] - keys.shape[1])))
            keys[hard.long()] = torch.nn.functional.pad(best, (0, keys.shape[1] - best.shape[1]))
        return keys

    def _scan(self, chosen: Tensor, queries: Queries, state: State, k: int) -> tuple[list[int], int]:
        """Candidates of some queries in all blocks; the queries that lost some, and how many others hold at most."""
        if not self._waves:
            self._waves = [self._numbers(wave) for wave in _waves(list(self._blocks))]
        for wave in self._waves:
            self._engine.scan(self._of_blocks(), wave, queries, chosen, state)
            self._engine.raise_thresholds(chosen, state, k)
        # The one place where the host waits.
        width, lost = state.summary.tolist()
        return state.lost.nonzero()[:, 0].tolist() if lost else [], width

    def _restarted(self, queries: list[int], state: State) -> Tensor:
        chosen = torch.tensor(queries, device=self.device)
        for tensor in (state.histograms, state.counts, state.lost):
            tensor[chosen] = 0
        state.summary.zero_()
        return chosen.int()

    def _rescored(self, queries: Queries, chosen: Tensor, state: State, width: int, k: int) -> Tensor:
        """Keys of the best candidates of some queries, of up to ``width`` each."""
        if width == 0:
            return torch.zeros(chosen.numel(), 0, dtype=torch.int64, device=self.device)
        self._engine.rescore(self._of_blocks(), queries, chosen, state, width, self._wide)
        keys = state.candidates[:, :width]
        if chosen.numel() < keys.shape[0]:
            keys = keys[chosen.long()]
        return keys.topk(min(k, width), dim=1).values

    def _block_by_block(self, chosen: Tensor, queries: Queries, state: State, k: int) -> Tensor:
        """For queries with more candidates than the buffer holds, however high the threshold: equal scores in masses."""
        best = torch.zeros(chosen.numel(), 0, dtype=torch.int64, device=self.device)
        for block in self._blocks:
            state.counts[chosen.long()] = 0
            self._engine.scan(self._of_blocks(), self._numbers([block]), queries, chosen, state)
            self._engine.raise_thresholds(chosen, state, k)
            width = int(state.counts[chosen.long()].max())
            keys = torch.cat([best, self._rescored(queries, chosen, state, width, k)], dim=1)
            best = keys.topk(min(k, keys.shape[1]), dim=1).values
        return best

    def _of_blocks(self) -> Tables:
        if self._tables is None:
            addresses = []
            for postings, *rows, live in self._blocks.values():
                lists = (postings.ids, postings.impacts, postings.starts, postings.scales)
                addresses.append([0 if tensor is None else tensor.data_ptr() for tensor in (*lists, live, *rows)])
            self._tables = Tables(*torch.tensor(addresses, dtype=torch.int64).T.contiguous().to(self.device))
        return self._tables

    def _sample(self, k: int) -> Tensor:
        """Blocks that give the first threshold, as many as have several times k documents."""
        blocks = list(self._blocks)
        few = len(blocks) < 8 * SAMPLE_BLOCKS
        wanted = max(1 if few else SAMPLE_BLOCKS, -(-2 * k // DOCUMENTS_PER_BLOCK))
        if wanted not in self._samples:
            self._samples[wanted] = self._numbers(blocks[:: max(1, len(blocks) // wanted)][:wanted])
        return self._samples[wanted]

    def _numbers(self, blocks: list[int]) -> Tensor:
        return torch.tensor(blocks, dtype=torch.int32, device=self.device)


def _waves(blocks: list[int]) -> Iterator[list[int]]:
    """Stretches of blocks, each ``GROWTH`` times as long as all before it."""
    first, size = 0, GROWTH * SAMPLE_BLOCKS
    while first < len(blocks):
        # A short rest goes with the last wave.
        end = len(blocks) if len(blocks) - first - size < size // 4 else first + size
        yield blocks[first:end]
        first, size = end, GROWTH * end


@functools.cache
def _engine(device: torch.device) -> CudaEngine:
    try:
        from pylate_fastmaxsim.kernels.runtime.nvrtc import CudaKernels

        kernels = CudaKernels(SOURCE, definitions())
        kernels.compile(device)
    except (ImportError, RuntimeError) as error:  # no bindings, no NVRTC, or a GPU that it does not know
        reason = str(error).partition("\n")[0].rstrip(".")
        raise ImportError(
            f"sparse search: CUDA C++ cannot be compiled ({reason}); run `pip install cuda-bindings`, in the version of "
            "your CUDA, or search on a CPU."
        ) from error
    return CudaEngine(kernels)
