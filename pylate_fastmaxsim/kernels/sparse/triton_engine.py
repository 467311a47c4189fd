"""The steps of a sparse search in Triton, for machines without NVRTC's bindings. `search.cu` explains them.

Triton has no adds into shared memory, so a program adds into a slice of global memory of its own, which stays in the cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pylate_fastmaxsim.kernels.sparse.postings import DOCUMENTS_PER_BLOCK, UNIT
from pylate_fastmaxsim.kernels.sparse.state import BIN_SHIFT, BINS, LARGEST, Queries, State, Tables

# Programs of a scan on a multiprocessor, each with a slice of 64 KiB.
PROGRAMS_PER_PROCESSOR = 8
POSTINGS_AT_ONCE = 256
ROW_TERMS_AT_ONCE = 128
# Numbers of float32 above 0.
SMALLEST, GREATEST = 2.0**-149, torch.finfo(torch.float32).max


@triton.jit
def sum_of(score, unit, SMALLEST: tl.constexpr, GREATEST: tl.constexpr):
    return (tl.minimum(score, GREATEST) * (1.0 - 4.8e-7) - SMALLEST) * unit - 1.0


@triton.jit
def prepare_kernel(
    offsets, terms, weights, top_scales, at_least, units, margins, thresholds,
    LARGEST: tl.constexpr, SMALLEST: tl.constexpr, GREATEST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    query = tl.program_id(0).to(tl.int64)
    begin = tl.load(offsets + query)
    end = tl.load(offsets + query + 1)
    sums = tl.zeros([BLOCK], tl.float64)
    for first in range(begin, end, BLOCK):
        at = first + tl.arange(0, BLOCK)
        term = tl.load(terms + at, mask=at < end, other=0)
        weight = tl.load(weights + at, mask=at < end, other=0.0)
        sums += weight.to(tl.float64) * tl.load(top_scales + term, mask=at < end, other=0.0).to(tl.float64)
    total = tl.sum(sums, 0)
    count = (end - begin).to(tl.float64)
    unit = tl.where(total > 0.0, (LARGEST / 255.0 - count) / tl.where(total > 0.0, total, 1.0), 0.0)
    tl.store(units + query, unit)
    margin = 255.0 * count + total * unit + 512.0 + unit * SMALLEST
    tl.store(margins + query, tl.minimum(margin, LARGEST).to(tl.int32))
    lowest = count * 0.0 + 1.0
    if at_least is not None:
        lowest = sum_of(tl.load(at_least + query).to(tl.float64), unit, SMALLEST, GREATEST)
    tl.store(thresholds + query, tl.minimum(tl.maximum(lowest, 1.0), LARGEST).to(tl.int32))


@triton.jit
def walk_kernel(
    ids, impacts, starts, scales, live, blocks, chosen, chosen_count, offsets, terms, weights, units, thresholds,
    histograms, counts, candidates, capacity, slices, items, programs,
    COLLECT: tl.constexpr, DOCUMENTS: tl.constexpr, UNIT: tl.constexpr, BINS: tl.constexpr, BIN_SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    lane = tl.arange(0, BLOCK)
    sums = slices + tl.program_id(0).to(tl.int64) * DOCUMENTS
    for item in range(tl.program_id(0), items, programs):
        query = tl.load(chosen + item % chosen_count).to(tl.int64)
        block = tl.load(blocks + item // chosen_count)
        id_list = tl.load(ids + block).to(tl.pointer_type(tl.int16))
        impact_list = tl.load(impacts + block).to(tl.pointer_type(tl.uint8))
        start_list = tl.load(starts + block).to(tl.pointer_type(tl.int32))
        scale_list = tl.load(scales + block).to(tl.pointer_type(tl.float32))
        unit = tl.load(units + query)
        for first in range(0, DOCUMENTS, BLOCK):
            tl.store(sums + first + lane, tl.zeros([BLOCK], tl.int32))
        tl.debug_barrier()
        for i in range(tl.load(offsets + query), tl.load(offsets + query + 1)):
            term = tl.load(terms + i)
            factor = tl.load(weights + i).to(tl.float64) * tl.load(scale_list + term).to(tl.float64) * unit
            factor = tl.ceil(factor).to(tl.int32)
            begin = tl.load(start_list + term) * UNIT
            end = tl.load(start_list + term + 1) * UNIT
            for first in range(begin, end, BLOCK):
                here = first + lane < end
                document = tl.load(id_list + first + lane, mask=here, other=0).to(tl.int32) & 0xFFFF
                impact = tl.load(impact_list + first + lane, mask=here, other=0).to(tl.int32)
                tl.atomic_add(sums + document, impact * factor, mask=here, sem="relaxed")
        tl.debug_barrier()
        threshold = tl.load(thresholds + query)
        alive = tl.load(live + block)
        for first in range(0, DOCUMENTS, BLOCK):
            # Past the first cache, which does not see what atomics add.
            total = tl.load(sums + first + lane, cache_modifier=".cg")
            found = total >= threshold
            if alive != 0:
                found &= tl.load(alive.to(tl.pointer_type(tl.uint8)) + first + lane, mask=found, other=0) != 0
            if tl.sum(found.to(tl.int32), 0) > 0:
                column = tl.minimum(total >> BIN_SHIFT, BINS - 1)
                tl.atomic_add(histograms + query * BINS + column, 1, mask=found, sem="relaxed")
                if COLLECT:
                    slot = tl.atomic_add(counts + query + lane * 0, 1, mask=found, sem="relaxed")
                    candidate = (total.to(tl.int64) << 32) | (block * DOCUMENTS + first + lane).to(tl.uint32).to(
                        tl.int64
                    )
                    tl.store(candidates + query * capacity + slot, candidate, mask=found & (slot < capacity))
        tl.debug_barrier()


@triton.jit
def raise_kernel(
    chosen, histograms, units, margins, thresholds, counts, candidates, lost, capacity, k,
    BINS: tl.constexpr, BIN_SHIFT: tl.constexpr, SMALLEST: tl.constexpr, GREATEST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    query = tl.load(chosen + tl.program_id(0)).to(tl.int64)
    column = tl.arange(0, BINS)
    at_or_above = tl.cumsum(tl.load(histograms + query * BINS + column), 0, reverse=True)
    highest = tl.max(tl.where(at_or_above >= k, column, -1), 0)
    edge = tl.where(highest >= 0, (highest << BIN_SHIFT) - tl.load(margins + query), 0)
    unit = tl.load(units + query)
    ceiling = tl.minimum(sum_of(unit * 0.0 + GREATEST, unit, SMALLEST, GREATEST), edge.to(tl.float64)).to(tl.int32)
    threshold = tl.maximum(ceiling, tl.load(thresholds + query))
    tl.store(thresholds + query, threshold)
    found = tl.load(counts + query)
    count = tl.minimum(found, capacity)
    own = candidates + query * capacity
    kept = 0
    for first in range(0, count, BLOCK):
        at = first + tl.arange(0, BLOCK)
        candidate = tl.load(own + at, mask=at < count, other=0)
        keep = (candidate >> 32) >= threshold
        slot = kept + tl.cumsum(keep.to(tl.int32), 0) - 1
        tl.debug_barrier()
        tl.store(own + slot, candidate, mask=keep)
        kept += tl.sum(keep.to(tl.int32), 0)
        tl.debug_barrier()
    tl.store(counts + query, kept)
    if found > capacity:
        tl.store(lost + query, 1)


@triton.jit
def rescore_kernel(
    chosen, query_offsets, query_terms, query_weights, row_offsets, row_terms, row_weights, counts, candidates, capacity,
    DOCUMENTS: tl.constexpr, WIDE_TERMS: tl.constexpr, WIDE_WEIGHTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    query = tl.load(chosen + tl.program_id(1)).to(tl.int64)
    place = candidates + query * capacity + tl.program_id(0)
    if tl.program_id(0) >= tl.load(counts + query):
        tl.store(place, 0)
    else:
        position = tl.load(place) & 0xFFFFFFFF
        block = position // DOCUMENTS
        offsets = tl.load(row_offsets + block).to(tl.pointer_type(tl.int64)) + position % DOCUMENTS
        terms = tl.load(row_terms + block)
        weights = tl.load(row_weights + block)
        end = tl.load(offsets + 1)
        total = tl.full([], 0.0, tl.float64)
        for first in range(tl.load(offsets), end, BLOCK):
            at = first + tl.arange(0, BLOCK)
            if WIDE_TERMS:
                own = tl.load(terms.to(tl.pointer_type(tl.int32)) + at, mask=at < end, other=-1)
            else:
                own = tl.load(terms.to(tl.pointer_type(tl.int16)) + at, mask=at < end, other=0).to(tl.int32) & 0xFFFF
                own = tl.where(at < end, own, -1)
            if WIDE_WEIGHTS:
                weight = tl.load(weights.to(tl.pointer_type(tl.float32)) + at, mask=at < end, other=0.0)
            else:
                weight = tl.load(weights.to(tl.pointer_type(tl.float16)) + at, mask=at < end, other=0.0)
            weight = weight.to(tl.float64)
            # One term after the other, which is the order that a score is defined by. At most one place has it.
            for i in range(tl.load(query_offsets + query), tl.load(query_offsets + query + 1)):
                shared = tl.sum(tl.where(own == tl.load(query_terms + i), weight, 0.0), 0)
                total += shared * tl.load(query_weights + i).to(tl.float64)
        bits = total.to(tl.float32).to(tl.int32, bitcast=True).to(tl.int64)
        tl.store(place, (bits << 32) | (0xFFFFFFFF - position))


class TritonEngine:
    """Launches the kernels above."""

    def __init__(self, device: torch.device, documents: int = DOCUMENTS_PER_BLOCK):
        self._documents = documents
        self._programs = 2
        if device.type == "cuda":
            processors = torch.cuda.get_device_properties(device).multi_processor_count
            self._programs = PROGRAMS_PER_PROCESSOR * processors
        self._slices = torch.zeros(self._programs, documents, dtype=torch.int32, device=device)

    def prepare(self, queries: Queries, top_scales: Tensor, at_least: Tensor | None, state: State) -> None:
        for tensor in (state.counts, state.lost, state.histograms, state.summary):
            tensor.zero_()
        prepare_kernel[(len(queries),)](
            *queries, top_scales, at_least, state.units, state.margins, state.thresholds,
            LARGEST=float(LARGEST), SMALLEST=SMALLEST, GREATEST=GREATEST, BLOCK=128,
        )  # fmt: skip

    def count(self, tables: Tables, blocks: Tensor, queries: Queries, chosen: Tensor, state: State) -> None:
        self._walk(False, tables, blocks, queries, chosen, state)

    def scan(self, tables: Tables, blocks: Tensor, queries: Queries, chosen: Tensor, state: State) -> None:
        self._walk(True, tables, blocks, queries, chosen, state)

    def _walk(
        self, collect: bool, tables: Tables, blocks: Tensor, queries: Queries, chosen: Tensor, state: State
    ) -> None:
        walk_kernel[(self._programs,)](
            *tables[:5], blocks, chosen, chosen.numel(), *queries, state.units, state.thresholds, state.histograms,
            state.counts, state.candidates, state.capacity, self._slices, blocks.numel() * chosen.numel(), self._programs,
            COLLECT=collect, DOCUMENTS=self._documents, UNIT=UNIT, BINS=BINS, BIN_SHIFT=BIN_SHIFT, BLOCK=POSTINGS_AT_ONCE,
        )  # fmt: skip

    def raise_thresholds(self, chosen: Tensor, state: State, k: int, restart: bool = False) -> None:
        raise_kernel[(chosen.numel(),)](
            chosen, state.histograms, state.units, state.margins, state.thresholds, state.counts, state.candidates,
            state.lost, state.capacity, k, BINS=BINS, BIN_SHIFT=BIN_SHIFT, SMALLEST=SMALLEST, GREATEST=GREATEST, BLOCK=1024,
        )  # fmt: skip
        state.summary.copy_(torch.stack([state.counts.max(), state.lost.max()]))
        if restart:
            state.histograms[chosen.long()] = 0

    def rescore(
        self, tables: Tables, queries: Queries, chosen: Tensor, state: State, width: int, wide: tuple[bool, bool]
    ) -> None:
        rescore_kernel[(width, chosen.numel())](
            chosen, *queries, *tables[5:], state.counts, state.candidates, state.capacity,
            DOCUMENTS=self._documents, WIDE_TERMS=wide[0], WIDE_WEIGHTS=wide[1], BLOCK=ROW_TERMS_AT_ONCE, num_warps=1,
        )  # fmt: skip

    def unpack(self, keys: Tensor, k: int) -> tuple[Tensor, Tensor]:
        keys = torch.nn.functional.pad(keys, (0, k - keys.shape[1]))
        positions = torch.where(keys > 0, 0xFFFFFFFF - (keys & 0xFFFFFFFF), -1)
        return (keys >> 32).int().view(torch.float32), positions
