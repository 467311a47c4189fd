"""The documents that a program scores: where each one lies, and tiles of its similarities."""

import triton
import triton.language as tl

from pylate_fastmaxsim.kernels.primitives.similarities import inner_products


@triton.jit
def document_of_slot(slot, last_slot, d_starts, d_lengths, candidates, zero_floor):
    """First row, number of tokens and floor of the maximum of the document in a slot.

    A document without tokens is scored at a row that exists, and its result discarded.
    """
    document = tl.cast(tl.minimum(slot, last_slot), tl.int64)
    if candidates is not None:
        document = tl.load(candidates + document)
    length = tl.load(d_lengths + document).to(tl.int32)
    start = tl.where(length > 0, tl.load(d_starts + document), 0)
    floor = tl.full([], float("-inf"), tl.float32)
    if zero_floor is not None:
        floor = tl.where(tl.load(zero_floor + document) != 0, 0.0, floor)
    return start, length, floor


@triton.jit
def span_of_slot(slot, last_slot, d_starts, d_lengths, candidates):
    """The first two of :func:`document_of_slot`."""
    start, length, floor = document_of_slot(slot, last_slot, d_starts, d_lengths, candidates, None)
    return start, length


@triton.jit
def tiles_of_slots(first_slot, last_slot, d_starts, d_lengths, candidates, BLOCK_N: tl.constexpr):
    """Number of tiles of BLOCK_N tokens of the documents of up to 8 slots, one of an empty document.

    Scalar loads rather than a sum over a vector, so that the compiler knows that all threads take as many steps.
    """
    tiles = 0
    for i in tl.static_range(8):
        start, listed = span_of_slot(first_slot + i, last_slot, d_starts, d_lengths, candidates)
        tiles += tl.where(first_slot + i <= last_slot, tl.maximum(tl.cdiv(listed, BLOCK_N), 1), 0)
    return tiles


@triton.jit
def similarities_of_document(
    q_tile,
    q_pointers,
    q_live,
    document,
    live_tokens,
    length,
    first,
    DIM: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Products of BLOCK_M query rows with BLOCK_N tokens of a document from its live token `first` on.

    `document` points to the first token; `live_tokens` lists the tokens that count, or is None for all.
    """
    column = tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    last_token = tl.maximum(length, 1) - 1
    # Columns past the end repeat the last token, which changes no maximum and needs no mask.
    if live_tokens is None:
        row = tl.minimum(column, last_token - first)
        document += tl.cast(first, tl.int64) * DIM
    else:
        row = tl.load(live_tokens + tl.minimum(first + column, last_token), mask=length > 0, other=0)
    # int64 before the product: one instruction. A 32-bit product takes four to become an address.
    d_pointers = document + k[None, :] + row[:, None].to(tl.int64) * DIM
    return inner_products(q_tile, q_pointers, q_live, d_pointers, DIM, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K)
