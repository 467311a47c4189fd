"""Token embeddings of a corpus on disk, plain or compressed, read through memory maps in batches for search."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from pylate_fastmaxsim._checks import require_count, require_integer, require_positions
from pylate_fastmaxsim.codec import ResidualCodec
from pylate_fastmaxsim.files.lock import writing
from pylate_fastmaxsim.retrieval.formats.description import rank_folder
from pylate_fastmaxsim.retrieval.formats.format import Batch, chosen_format
from pylate_fastmaxsim.retrieval.formats.part import Part, open_parts
from pylate_fastmaxsim.retrieval.formats.reading import batch_on, streamed
from pylate_fastmaxsim.retrieval.formats.writer import write
from pylate_fastmaxsim.tokens import Tokens, token_batches

TOKENS_PER_BATCH = 1 << 20

Batches = Tokens | Iterable[Tokens] | Callable[[int], Tokens | Iterable[Tokens]]


def write_corpus(
    folder: str | os.PathLike,
    batches: Batches,
    dtype: torch.dtype = torch.bfloat16,
    *,
    format: str | ResidualCodec | None = None,
    rank: tuple[int, int] | None = None,
) -> Corpus:
    """Write token embeddings to a folder, batch after batch, and open it.

    Only tokens that count are written: no padding, and none that ``keep`` leaves out. A document without tokens stays a
    document. The folder is a corpus once everything is written. A call that is interrupted by an error keeps the batches
    before it, one that is killed those of up to 30 seconds before. The same call goes on behind them if ``batches`` is a
    function. So does a later call that has more documents; until it ends, the folder opens as it was.

    Parameters
    ----------
    folder
        Where to write: empty, yet to be made, or with ``batches`` a function, the folder of an earlier call.
    batches
        Batches of documents as :func:`~pylate_fastmaxsim.retrieval.search.search` takes them, all of one d, on any
        device; they may come from a generator. Or a function that returns them, called with the number of documents that the folder (with a ``rank``, that of this process) holds already:
        it begins with the document of this number.
    dtype
        What vectors are rounded to on disk: torch.bfloat16, torch.float16 or torch.float32. Not with a ``format``.
    format
        How to compress them, as :func:`pylate_fastmaxsim.compress` does: ``"int8"``, ``"fp8"`` or a
        :class:`pylate_fastmaxsim.ResidualCodec`. The first batch sets the scale of fp8.
    rank
        ``(r, n)``: this is process r of n that write one corpus, each its own documents, in a folder inside of
        ``folder``. ``Corpus(folder)`` opens when all are finished, with the documents of rank 0 first. Only the last rank
        takes more documents once it is finished.

    Returns
    -------
    Corpus
        What the folder holds; with a ``rank``, the documents of this rank.

    Raises
    ------
    ValueError
        The folder is not empty and ``batches`` no function, or it holds something else than documents of this format
        and d; there is no batch, batches differ in d, ``dtype``, ``format`` or ``rank`` is another, a number is too large
        for the format (or, compressed, not finite), a file of an earlier call is damaged, a finished rank with others
        behind it is to take more documents, or another process writes the folder.
    TypeError
        Something in ``batches`` is none.
    OSError
        Writing fails, as on a full disk.

    Notes
    -----
    If the first batch is refused, or any batch where ``batches`` is no function, the folder is left empty.

    Examples
    --------
    >>> import tempfile, torch
    >>> from pylate_fastmaxsim import TokenBatch
    >>> from pylate_fastmaxsim.retrieval.corpus import write_corpus
    >>> from pylate_fastmaxsim.retrieval.search import search
    >>> documents = [size * torch.eye(2) for size in (2.0, 1.0, 3.0)]
    >>> def batches(held):
    ...     return (TokenBatch.from_list([document]) for document in documents[held:])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     corpus = write_corpus(folder, batches, format="int8")
    ...     len(corpus), corpus.tokens, corpus.dim
    ...     search(TokenBatch.from_list([torch.eye(2)]), corpus, k=2)
    (3, 6, 2)
    (tensor([[6., 4.]]), tensor([[2, 0]]))
    """
    stored = chosen_format(dtype, format)
    folder = Path(folder) if rank is None else rank_folder(Path(folder), rank)
    if not callable(batches):
        batches = token_batches("write_corpus", "batches", batches)
    others_follow = rank is not None and rank[0] < rank[1] - 1
    with writing("write_corpus", folder):
        write(folder, batches, stored, others_follow)
    return Corpus(folder)


class Corpus:
    """Token embeddings on disk that :func:`write_corpus` has written.

    ``len`` is the number of documents, ``tokens`` that of their vectors, and ``nbytes`` what they take on disk. ``dim`` is
    that of the vectors; ``format`` is ``"bfloat16"``, ``"float16"``, ``"float32"``, ``"int8"``, ``"fp8"`` or
    ``"residual"``, and ``dtype`` that of the first three, else None.

    Opening reads only the sizes and checksums. The files are mapped into memory, and the operating system reads and caches
    what is used. Before a chunk of 64 KiB is used for the first time, it is compared with its checksum, so that damage is
    an error and never another result; :meth:`verify` does so with all of them. If a file is truncated while it is mapped,
    or the disk fails, reading ends the process (SIGBUS) without a Python error.

    Threads may share a corpus. A process that adds documents does not change one that is open.

    Parameters
    ----------
    folder
        Where the corpus is.

    Raises
    ------
    ValueError
        The folder holds no complete corpus, a rank is missing, or a file is damaged or missing. Methods that read the
        documents raise it where these are damaged.
    OSError
        A file cannot be opened or mapped.
    """

    def __init__(self, folder: str | os.PathLike, *, _parts: list[Part] | None = None) -> None:
        # `_parts` are those that are open already.
        folder = Path(folder)
        parts = open_parts(folder) if _parts is None else _parts
        self.folder, self.parts = folder, parts
        stored = parts[0].format
        self.dim: int = stored.dim
        self.format: str = stored.name
        self.dtype: torch.dtype | None = stored.dtype
        for part in parts:
            if (part.format.name, part.format.dim) != (self.format, self.dim):
                raise ValueError(
                    f"Corpus: {folder} must be of one format and d, but {part.file.parent} is {part.format.name} of d = "
                    f"{part.format.dim}, and {parts[0].file.parent} {self.format} of d = {self.dim}."
                )
        self.tokens: int = sum(part.tokens for part in parts)
        # Documents before each part, and all.
        self._firsts = torch.tensor([0, *accumulate(map(len, parts))], device="cpu")

    def __len__(self) -> int:
        return self._firsts[-1].item()

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays on disk."""
        return sum(tensor.nbytes for part in self.parts for tensor in (*part.arrays.values(), part.bounds))

    def verify(self) -> None:
        """Read all that was not read before, and compare it with its checksums.

        An index that :func:`pylate_fastmaxsim.read_plaid` has opened has none; of it only codes are looked at.

        Raises
        ------
        ValueError
            A file is damaged: the first that is found.
        """
        for part in self.parts:
            part.verify()

    def batches(
        self,
        device: str | torch.device = "cpu",
        tokens_per_batch: int = TOKENS_PER_BATCH,
        begin: int = 0,
        end: int | None = None,
    ) -> Iterator[Batch]:
        """The documents in order, in batches for :func:`pylate_fastmaxsim.retrieval.search.search`.

        A batch is a ``TokenBatch``, or of a compressed corpus a ``CompressedBatch``. On a CPU it is a view of the memory
        map. For a GPU a thread reads ahead into pinned memory and copies on its own stream while earlier batches are
        scored. It holds three batches. Before it loads another, it waits until the GPU has finished what the caller queued
        for the oldest. The thread ends with the iteration, also if that is abandoned.

        Parameters
        ----------
        device
            Where the batches are to be.
        tokens_per_batch
            Most tokens of a batch, at least 1. A document that has more is a batch by itself. On a GPU three times as
            many are held in pinned memory, and as many in that of the GPU, in the format of the corpus: the default takes
            256 MiB for each at 128 numbers of 16 bits, 128 MiB as int8 or fp8, and 40 MiB as residual codes of 2 bits.
        begin, end
            Documents from ``begin`` to before ``end``; all by default.

        Raises
        ------
        ValueError
            ``tokens_per_batch`` is below 1, ``begin`` and ``end`` do not fit the corpus, or a file is damaged, which is
            told in the turn of the batch.
        TypeError
            One of these is no integer.

        Notes
        -----
        Do not write to the vectors; on a CPU that ends the process. An error of the thread is raised here, in its turn. A
        batch stays valid for as long as you keep it. On a GPU, use it on the stream that was current when you took it.
        """
        device, end = torch.device(device), len(self) if end is None else end
        tokens_per_batch = require_count("Corpus.batches", "tokens_per_batch", tokens_per_batch)
        begin, end = (
            require_integer(f"Corpus.batches: {name}", value) for name, value in (("begin", begin), ("end", end))
        )
        if not 0 <= begin <= end <= len(self):
            raise ValueError(
                f"Corpus.batches: begin and end must be in order and from 0 to {len(self)}, got {begin} and {end}."
            )
        pieces = (
            (part, *cut)
            for part, first in zip(self.parts, self._firsts.tolist(), strict=False)
            for cut in part.cuts(tokens_per_batch, max(begin - first, 0), min(end - first, len(part)))
        )
        if device.type == "cuda":
            # Here, because each thread has its own current device.
            device = torch.empty(0, device=device).device
            return streamed(device, list(pieces))
        return (batch_on(device, part.format, *part.views(first, last))[0] for part, first, last in pieces)

    def lengths(self, begin: int = 0) -> Tensor:
        """Numbers of tokens of the documents from ``begin`` on, int64."""
        spans = [
            part.bounds_of(torch.arange(max(begin - first, 0), max(begin - first, len(part)), device="cpu"))
            for part, first in zip(self.parts, self._firsts.tolist(), strict=False)
        ]
        return torch.cat([ends - starts for starts, ends in spans])

    def select(self, positions: Tensor | Sequence[int], device: str | torch.device = "cpu") -> Batch:
        """The documents at some positions, read into memory, in the order of ``positions``.

        Parameters
        ----------
        positions
            Numbers of documents, ``[n]``, int64, in any order, repeats allowed.
        device
            Where the batch is to be.

        Raises
        ------
        ValueError
            A position is not in the corpus, documents are in parts of other codecs or fp8 scales (``parts``), or a file
            is damaged.
        TypeError
            Positions are no integers.
        """
        positions = require_positions("Corpus.select", positions, len(self))
        by_part = self._by_part(positions)
        stored = (by_part[0][0] if by_part else self.parts[0]).format
        if any(part.format != stored for part, _, _ in by_part):
            raise ValueError(
                "Corpus.select: these documents are in parts of other codecs or fp8 scales; select those of one part."
            )
        gathered = [part.gathered(documents) for part, _, documents in by_part] or [self.parts[0].gathered(positions)]
        arrays = {name: torch.cat([arrays[name] for arrays, _ in gathered]) for name in gathered[0][0]}
        lengths = torch.cat([lengths for _, lengths in gathered])
        starts = lengths.cumsum(0) - lengths
        if len(by_part) > 1:
            back = torch.cat([places for _, places, _ in by_part]).argsort()
            starts, lengths = starts[back], lengths[back]
            arrays |= {name: arrays[name][back] for name, column in stored.columns.items() if column.per_document}
        longest = int(lengths.max()) if len(lengths) else 0
        return stored.decode(arrays, starts, lengths, longest).to(device)

    def blocks(self, positions: Tensor, tokens_per_block: int) -> list[Tensor]:
        """Ascending positions in blocks for :meth:`select`, with about that many tokens at most, each of one part."""
        blocks = []
        for part, places, documents in self._by_part(positions):
            starts, ends = part.bounds_of(documents)
            sizes = ((ends - starts).cumsum(0) // tokens_per_block).unique_consecutive(return_counts=True)[1]
            blocks += positions[places].split(sizes.tolist())
        return blocks

    def _by_part(self, positions: Tensor) -> list[tuple[Part, Tensor, Tensor]]:
        """Parts that hold some of the positions: each with their places in ``positions`` and numbers in the part."""
        numbers = torch.searchsorted(self._firsts, positions, right=True) - 1
        return [
            (self.parts[number], places, positions[places] - self._firsts[number])
            for number in numbers.unique().tolist()
            for places in [(numbers == number).nonzero().flatten()]
        ]
