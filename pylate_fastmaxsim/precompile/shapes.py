"""Sizes of a batch that is scored, and the calls whose kernels such a batch can run."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch

from pylate_fastmaxsim._checks import require_count
from pylate_fastmaxsim.ops.operands import KERNEL_DTYPES
from pylate_fastmaxsim.pooling import LogSumExp, Max, Pooling, Softmax, check_pooling

# Of compressed documents, with the bits of residual codes.
FORMATS = {"int8": 8, "int8-per-token": 8, "fp8": 8, "residual-1": 1, "residual-2": 2, "residual-4": 4}
MASKED = ("nothing", "queries", "documents", "both")


@dataclass(frozen=True)
class BatchShape:
    """Sizes of batches whose kernels :func:`pylate_fastmaxsim.warmup` compiles.

    Kernels depend on these numbers: name those of the batches that you will score. A last batch that is smaller, or
    batches with another longest text, are shapes of their own.

    Parameters
    ----------
    queries, query_tokens
        Queries of a batch, and tokens of its longest query.
    documents, document_tokens
        Documents that they are scored against, and tokens of the longest.
    dim
        Size d of a token vector.
    dtype
        Of the vectors, under autocast that of autocast: bfloat16, float16 or float32. The precision of float32 products
        is the one in force when they are compiled.
    candidates
        How many documents each query scores for itself. None: all.
    masked
        Which sides may have tokens that do not count, some of "nothing", "queries", "documents" and "both".
    gradients
        Whether a backward follows. Kernels of scores alone are compiled in any case.
    zero_floor
        Whether documents have a floor of 0, as with ``stock_masking``.
    poolings
        Poolings of :func:`pylate_fastmaxsim.pooled_scores`, of which ``Max()`` is MaxSim. Temperatures do not matter.
    formats
        Compressed documents: some of "int8", "int8-per-token", "fp8", "residual-1", "residual-2" and "residual-4".
    save_documents
        "int8": those of :func:`pylate_fastmaxsim.maxsim` with this argument, too.
    xtr
        The k of :func:`pylate_fastmaxsim.xtr_scores`. None: no XTR scores.
    hidden
        Size of the hidden states that are projected to ``dim``. None: nothing is projected.
    splade
        :func:`pylate_fastmaxsim.splade_pool` of texts that are as long as the documents and have hidden states of size
        ``dim``, with both activation functions, with and without a bias. Vocabulary and number of texts do not matter.
        ``poolings=()`` leaves MaxSim out.

    Raises
    ------
    ValueError
        A number is below 1, or a dtype, a mask, a format or ``save_documents`` is none of the above.
    TypeError
        A number is no integer, or a pooling is none.

    Examples
    --------
    >>> from pylate_fastmaxsim import BatchShape, Max, TopK
    >>> shape = BatchShape(128, 32, 256, 300, poolings=(Max(), TopK(4)), formats=("int8",))
    >>> shape.dtype
    torch.bfloat16
    """

    queries: int
    query_tokens: int
    documents: int
    document_tokens: int
    dim: int = 128
    dtype: torch.dtype = torch.bfloat16
    candidates: int | None = None
    masked: tuple[str, ...] = MASKED
    gradients: bool = True
    zero_floor: bool = False
    poolings: tuple[Pooling, ...] = (Max(),)
    formats: tuple[str, ...] = ()
    save_documents: str | None = None
    xtr: int | None = None
    hidden: int | None = None
    splade: bool = False

    def __post_init__(self) -> None:
        for name in ("queries", "query_tokens", "documents", "document_tokens", "dim"):
            require_count("BatchShape", name, getattr(self, name))
        for name in ("candidates", "xtr", "hidden"):
            if getattr(self, name) is not None:
                require_count("BatchShape", name, getattr(self, name))
        if self.dtype not in KERNEL_DTYPES:
            raise ValueError(
                f"BatchShape: dtype must be torch.bfloat16, torch.float16 or torch.float32, got {self.dtype}."
            )
        for name, allowed in (("masked", MASKED), ("formats", FORMATS)):
            # A string would be taken apart into its letters.
            given = getattr(self, name)
            if isinstance(given, str) or not set(given) <= set(allowed):
                raise ValueError(f"BatchShape: {name} must be a tuple of some of {', '.join(allowed)}, got {given!r}.")
        if not self.masked:
            raise ValueError("BatchShape: masked must have at least one of its values, got none.")
        if not isinstance(self.poolings, (tuple, list)):
            raise TypeError(f"BatchShape: poolings must be a tuple of poolings, got {self.poolings!r}.")
        if self.save_documents not in (None, "int8"):
            raise ValueError(f'BatchShape: save_documents must be "int8" or None, got {self.save_documents!r}.')
        for pooling in self.poolings:
            check_pooling("BatchShape", pooling)
        for form in self.formats:
            if self.dim * FORMATS[form] % 8:
                raise ValueError(f"BatchShape: d * bits must be a multiple of 8 for {form}, got d = {self.dim}.")


@dataclass(frozen=True)
class Call:
    """One call of an operator: ``score`` names it, a pooling, a format, "splade", or "saved", "xtr" or "project" with an
    option.

    ``query_rows`` is how many tokens the queries have in all. ``gapless``: every row of the vectors belongs to a text, as
    of packed ones and not of padded ones with a mask. ``gradients`` are those of "queries", of "documents" or of "both".
    """

    shape: BatchShape
    score: Pooling | str
    query_rows: int
    queries_masked: bool = False
    documents_masked: bool = False
    gapless: bool = True
    gradients: str | None = None
    option: bool = False


def calls_of(shape: BatchShape) -> Iterator[Call]:
    """All calls that may run different kernels; each kernel is run by at least one of them."""
    scores: list[tuple[Pooling | str, bool]] = [(pooling, False) for pooling in dict.fromkeys(shape.poolings)]
    for form in shape.formats:
        # Residual codes come with scales or, from PLAID's files, without.
        scores += [(form, option) for option in ((False, True) if form.startswith("residual") else (False,))]
    if shape.xtr is not None:
        scores += [("xtr", False), ("xtr", True)]  # divided by the positive, or by the retrieved tokens
    if shape.save_documents is not None and shape.gradients:
        scores.append(("saved", False))
    for (score, option), masked in product(scores, shape.masked):
        sides = masked in ("queries", "both"), masked in ("documents", "both")
        yield Call(shape, score, shape.queries, *sides, option=option)
        if shape.gradients:
            for gradients, gapless, rows in _backwards(shape, score, masked == shape.masked[0]):
                yield Call(shape, score, rows, *sides, gapless, gradients, option)
    if shape.hidden is not None:
        for gradients, option in product((None, "both") if shape.gradients else (None,), (False, True)):
            # Without or with a bias.
            yield Call(shape, "project", shape.queries, gradients=gradients, option=option)
    for masked in sorted({masked in ("documents", "both") for masked in shape.masked}) if shape.splade else ():
        yield Call(shape, "splade", shape.queries, documents_masked=masked)
        if shape.gradients:
            # Each gradient has kernels of its own, so that those of all are those of any.
            for gapless in (True, False):
                yield Call(shape, "splade", shape.queries, False, masked, gapless, "both")


def _backwards(shape: BatchShape, score: Pooling | str, first: bool) -> Iterator[tuple[str, bool, int]]:
    """Gradients, gaplessness and query rows of the backwards that differ; ``first``: with the first of the masks."""
    if score in FORMATS:
        return iter([("queries", True, shape.queries)])  # documents have none
    smooth = isinstance(score, (Softmax, LogSumExp))
    if not (smooth or first):
        return iter([("both", True, shape.queries)])  # a backward from winners looks at no mask
    rows = _query_rows(shape) if isinstance(score, Softmax) else [shape.queries]
    return product(("both", "queries", "documents"), (True, False), rows)


def _query_rows(shape: BatchShape) -> list[int]:
    """Numbers of query tokens with which the second half of softmax's state is at a multiple of 16 bytes, and is not."""
    slots = shape.documents if shape.candidates is None else shape.candidates
    most = min(shape.queries * shape.query_tokens, shape.queries + 4)
    return list({rows * slots % 4 == 0: rows for rows in range(most, shape.queries - 1, -1)}.values())
