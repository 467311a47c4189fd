"""Open an index of PLAID as a corpus, where it is."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pylate_fastmaxsim.codec import ResidualCodec
from pylate_fastmaxsim.retrieval.corpus import Corpus
from pylate_fastmaxsim.retrieval.formats.format import Arrays, ResidualDocuments
from pylate_fastmaxsim.retrieval.formats.part import Part
from pylate_fastmaxsim.retrieval.plaid import files
from pylate_fastmaxsim.retrieval.plaid.files import STANFORD, Layout


class PlaidCorpus(Corpus):
    """A :class:`~pylate_fastmaxsim.retrieval.corpus.Corpus` of what an index of PLAID stores.

    ``ids`` has the id of each document in order, as PyLate was given them. None where PyLate has not written the index:
    documents are in the order in which they were added, without those that fast-plaid has deleted.
    """

    ids: list[Any] | None


def read_plaid(folder: str | os.PathLike) -> PlaidCorpus:
    """Open an index of PLAID as a corpus, for exact scores of what it stores.

    Nothing is copied or rewritten: codes and residuals are mapped into memory where they are. ``folder`` is that of an
    index of PyLate (``index_folder/index_name``, with fast-plaid or with Stanford's code), of fast-plaid, or of
    Stanford's ColBERT. Documents that were added, deleted or updated count as they do for the index. It must not be
    changed while it is read.

    Returns
    -------
    PlaidCorpus
        A corpus of the format ``"residual"``, without scales: every vector has length 1, as for PLAID. Its ``ids`` are
        those of PyLate.

    Raises
    ------
    ValueError
        The folder holds no index that is known, one of other than 1, 2 or 4 bits, or a file that is missing, damaged or
        does not fit the others. Codes are looked at when they are read.
    OSError
        A file cannot be opened or mapped.

    Examples
    --------
    >>> import tempfile, torch
    >>> from fast_plaid.search import FastPlaid
    >>> from pylate_fastmaxsim import TokenBatch, read_plaid
    >>> from pylate_fastmaxsim.retrieval.search import search
    >>> documents = torch.nn.functional.normalize(torch.randn(50, 5, 16), dim=-1)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     index = FastPlaid(folder, device="cpu").create(list(documents), nbits=4)
    ...     corpus = read_plaid(folder)
    ...     scores, positions = search(TokenBatch.from_list([documents[7]]), corpus, k=1)
    ...     len(corpus), corpus.tokens, positions.tolist()
    (50, 250, [[7]])
    """
    folder = files.plaid_folder(Path(folder))
    layout = files.layout_of(folder)
    bits, chunks, merged = files.read_sizes(folder, layout)
    centroids, weights, cutoffs = files.read_buckets(folder, layout, bits)
    try:
        # fast-plaid computes with halves, also where it stores float32.
        codec = ResidualCodec(centroids.half(), weights.half(), cutoffs.float())
    except ValueError as error:
        raise ValueError(f"read_plaid: {folder} must hold a codec that can be used; {error}") from None
    stored = ResidualDocuments(codec, has_scales=False)
    parts, begin = [], 0
    for number in range(chunks):
        parts.append(_chunk(folder, number, layout, stored, merged, begin))
        begin += parts[-1].tokens
    ids = files.read_ids(folder)
    if ids is not None:
        numbers = list(range(sum(map(len, parts))))
        if layout is STANFORD:
            # A document that PyLate has removed is still there, without tokens.
            kept = [part.bounds.diff() > 0 for part in parts]
            numbers = torch.cat(kept).nonzero().flatten().tolist()
            parts = [part.of(some) for part, some in zip(parts, kept, strict=True)]
        if ids.keys() != set(numbers):
            raise ValueError(
                f"read_plaid: {files.ids_file(folder)} must hold the ids of the {len(numbers)} documents of the index, but "
                f"holds {len(ids)}, or those of others, as after a change without PyLate; build the index anew."
            )
        ids = [ids[number] for number in numbers]
    corpus = PlaidCorpus.of_parts(folder, parts)
    corpus.ids = ids
    return corpus


class _Chunk(Part):
    """A chunk of an index."""

    def views(self, begin: int, end: int) -> tuple[Arrays, Tensor, int]:
        arrays, bounds, longest = super().views(begin, end)
        return {**arrays, "codes": arrays["codes"].int()}, bounds, longest

    def of(self, kept: Tensor) -> _Chunk:
        """The chunk without some documents, none of which has tokens."""
        return _Chunk(self.format, self.arrays, torch.cat([self.bounds[:1], self.bounds[1:][kept]]), self.file)


def _chunk(folder: Path, number: int, layout: Layout, stored: ResidualDocuments, merged: bool, begin: int) -> _Chunk:
    """A chunk; ``begin``: where its rows begin in files of all chunks."""
    file = files.lengths_file(folder, number)
    lengths = files.read_json(file)
    if not isinstance(lengths, list) or not all(type(length) is int and length >= 0 for length in lengths):
        raise ValueError(f"read_plaid: {file} must be a list of integers from 0, the lengths of documents.")
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    tokens = int(bounds[-1])
    codes_file, packed_file = (files.rows_file(folder, number, name, layout, merged) for name in ("codes", "residuals"))
    # Behind the last chunk fast-plaid has rows of no document.
    codes, packed = (
        layout.read(file)[begin : begin + tokens] if file.name.startswith(files.MERGED) else layout.read(file)
        for file in (codes_file, packed_file)
    )
    files.require(codes_file, codes, files.WHOLE, (tokens,))
    files.require(packed_file, packed, (torch.uint8,), (tokens, stored.columns["packed"].width))
    return _Chunk(stored, {"codes": codes, "packed": packed}, bounds, file)
