"""Open an index of PLAID as a corpus, where it is, as fast-plaid and Stanford's code write it."""

import json
import os
import pickle
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pylate_fastmaxsim.codec import ResidualCodec
from pylate_fastmaxsim.retrieval.corpus import Corpus
from pylate_fastmaxsim.retrieval.formats.format import Format
from pylate_fastmaxsim.retrieval.formats.part import Part

METADATA_FILE = "metadata.json"
# In the folder of an index, PyLate has that of fast-plaid and what it knows of ids.
FAST_FOLDER = "fast_plaid_index"
IDS_FILE = "plaid_ids_to_documents_ids.pkl"
# Files of the rows of all chunks.
MERGED = "merged_"
KNOWN = "fast-plaid 1.4.6 to 1.7.0 and Stanford's ColBERT"

HALVES = (torch.float16, torch.float32)
WHOLE = (torch.int32, torch.int64)

# Libraries, by the endings of their files.
FAST_PLAID, STANFORD = "npy", "pt"


class PlaidCorpus(Corpus):
    """A :class:`~pylate_fastmaxsim.retrieval.corpus.Corpus` of what an index of PLAID stores.

    ``ids`` has the id of each document in order, as PyLate was given them. None where PyLate has not written the index:
    documents are in the order in which they were added, without those that fast-plaid has deleted.
    """

    def __init__(self, folder: Path, parts: list[Part], ids: list[Any] | None) -> None:
        """Use :func:`read_plaid`."""
        super().__init__(folder, _parts=parts)
        self.ids = ids


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
    folder = plaid_folder(Path(folder))
    layout = next((each for each in (FAST_PLAID, STANFORD) if (folder / f"centroids.{each}").exists()), None)
    if layout is None:
        raise _unknown_layout(folder, f"centroids.{FAST_PLAID} or centroids.{STANFORD}")
    bits, chunks, merged = read_sizes(folder, layout)
    codec = read_codec(folder, layout, bits)
    stored = Format("residual", codec.dim, codec=codec, has_scales=False)
    parts, begin = [], 0
    for number in range(chunks):
        parts.append(_chunk(folder, number, layout, stored, merged, begin))
        begin += parts[-1].tokens
    ids = _read_ids(folder)
    if ids is not None:
        numbers = list(range(sum(map(len, parts))))
        if layout == STANFORD:
            # A document that PyLate has removed is still there, without tokens.
            kept = [part.bounds.diff() > 0 for part in parts]
            numbers = torch.cat(kept).nonzero().flatten().tolist()
            parts = [
                replace(part, bounds=torch.cat([part.bounds[:1], part.bounds[1:][some]]))
                for part, some in zip(parts, kept, strict=True)
            ]
        if ids.keys() != set(numbers):
            raise ValueError(
                f"read_plaid: {_ids_file(folder)} must hold the ids of the {len(numbers)} documents of the index, but "
                f"holds {len(ids)}, or those of others, as after a change without PyLate; build the index anew."
            )
        ids = [ids[number] for number in numbers]
    return PlaidCorpus(folder, parts, ids)


def _chunk(folder: Path, number: int, layout: str, stored: Format, merged: bool, begin: int) -> Part:
    """A chunk; ``begin``: where its rows begin in files of all chunks."""
    file = lengths_file(folder, number)
    lengths = read_json(file)
    if not isinstance(lengths, list) or not all(type(length) is int and length >= 0 for length in lengths):
        raise ValueError(f"read_plaid: {file} must be a list of integers from 0, the lengths of documents.")
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    tokens = int(bounds[-1])
    codes_file, packed_file = (rows_file(folder, number, name, layout, merged) for name in ("codes", "residuals"))
    # Behind the last chunk fast-plaid has rows of no document.
    codes, packed = (
        _array(file)[begin : begin + tokens] if file.name.startswith(MERGED) else _array(file)
        for file in (codes_file, packed_file)
    )
    _require(codes_file, codes, WHOLE, (tokens,))
    _require(packed_file, packed, (torch.uint8,), (tokens, stored.columns["packed"].width))
    return Part(stored, {"codes": codes, "packed": packed}, bounds, tokens, file)


def plaid_folder(folder: Path) -> Path:
    """The folder with the files of an index, where ``folder`` may be that of PyLate. ValueError if there is none."""
    for each in (folder / FAST_FOLDER, folder):
        if (each / METADATA_FILE).exists():
            return each
    raise ValueError(
        f"read_plaid: {folder} must hold an index of PLAID, with {METADATA_FILE} in it or in {FAST_FOLDER}, as PyLate, "
        "fast-plaid and ColBERT write it."
    )


def read_sizes(folder: Path, layout: str) -> tuple[int, int, bool]:
    """Bits of each number, the number of chunks, and whether rows may be in files of all chunks only."""
    file = folder / METADATA_FILE
    metadata = read_json(file)
    metadata = metadata if isinstance(metadata, dict) else {}
    config = metadata if layout == FAST_PLAID else metadata.get("config")
    bits = config.get("nbits") if isinstance(config, dict) else None
    chunks, merged = metadata.get("num_chunks"), bool(metadata.get("frozen"))
    if bits is None or chunks is None:
        raise _unknown_layout(folder, f"nbits and num_chunks in {METADATA_FILE}")
    if bits not in (1, 2, 4) or not isinstance(chunks, int) or chunks < 1:
        raise ValueError(
            f"read_plaid: {file} must say nbits, 1, 2 or 4, and num_chunks, from 1, but says {bits!r} and {chunks!r}."
        )
    first = [
        lengths_file(folder, 0),
        *(rows_file(folder, 0, name, layout, merged) for name in ("codes", "residuals")),
    ]
    if (lacking := next((file.name for file in first if not file.exists()), None)) is not None:
        raise _unknown_layout(folder, lacking)
    return bits, chunks, merged


def _unknown_layout(folder: Path, lacking: str) -> ValueError:
    return ValueError(f"read_plaid: {folder} has a layout that is not known, without {lacking}; known are {KNOWN}.")


def lengths_file(folder: Path, chunk: int) -> Path:
    return folder / f"doclens.{chunk}.json"


def rows_file(folder: Path, chunk: int, name: str, layout: str = FAST_PLAID, merged: bool = False) -> Path:
    """File with the codes or residuals of a chunk.

    fast-plaid 1.7, and ``freeze()`` from 1.4.7 on, keep all chunks in one file, and only what changed since in its own.
    """
    own = folder / f"{chunk}.{name}.{layout}"
    return folder / f"{MERGED}{name}.{layout}" if merged and not own.exists() else own


def read_codec(folder: Path, layout: str, bits: int) -> ResidualCodec:
    """Centroids ``[C, d]``, weights ``[2**bits]`` and cutoffs ``[2**bits - 1]``."""
    centroids_file = folder / f"centroids.{layout}"
    centroids = _array(centroids_file)
    if layout == FAST_PLAID:
        file = folder / "bucket_weights.npy"
        weights, cutoffs = _array(file), _array(folder / "bucket_cutoffs.npy")
    else:
        file = folder / "buckets.pt"
        buckets = _array(file)
        cutoffs, weights = buckets if isinstance(buckets, tuple) and len(buckets) == 2 else (None, None)
    _require(centroids_file, centroids, HALVES, (None, None))
    _require(file, weights, HALVES, (2**bits,))
    _require(file, cutoffs, HALVES, (2**bits - 1,))
    try:
        # fast-plaid computes with halves, also where it stores float32.
        return ResidualCodec(centroids.half(), weights.half(), cutoffs.float())
    except ValueError as error:
        raise ValueError(f"read_plaid: {folder} must hold a codec that can be used; {error}") from None


def _read_ids(folder: Path) -> dict[int, Any] | None:
    """The id of each document by its number in the index, as PyLate keeps them; None where it has not written them."""
    file = _ids_file(folder)
    if not file.exists():
        return None
    with open(file, "rb") as opened:
        ids = _readable(file, lambda: _PlainUnpickler(opened).load())
    if not isinstance(ids, dict):
        raise ValueError(f"read_plaid: {file} must hold a mapping from numbers to ids, as PyLate writes it.")
    return ids


def _ids_file(folder: Path) -> Path:
    return (folder.parent if folder.name == FAST_FOLDER else folder) / IDS_FILE


class _PlainUnpickler(pickle.Unpickler):
    """Unpickle plain values only; what names a class or a function could run anything."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"ids must be strings or integers, but it names {module}.{name}")


def _require(file: Path, tensor: Any, dtypes: tuple[torch.dtype, ...], shape: tuple[int | None, ...]) -> None:
    """Refuse what is no tensor of one of these dtypes and of this shape, in which None is any size."""
    if (
        isinstance(tensor, Tensor)
        and tensor.dtype in dtypes
        and tensor.dim() == len(shape)
        and all(wanted in (None, size) for wanted, size in zip(shape, tensor.shape, strict=True))
    ):
        return
    got = f"{tensor.dtype} {list(tensor.shape)}" if isinstance(tensor, Tensor) else type(tensor).__name__
    sizes = ", ".join("any" if size is None else str(size) for size in shape)
    raise ValueError(
        f"read_plaid: {file} must hold {' or '.join(map(str, dtypes))} [{sizes}], as other files of the index have it, but "
        f"holds {got}; build the index anew."
    )


def read_json(file: Path) -> Any:
    return _readable(file, lambda: json.loads(file.read_text(encoding="utf-8")))


def _readable(file: Path, read: Callable[[], Any]) -> Any:
    if not file.exists():
        raise ValueError(f"read_plaid: {file} is missing; build the index anew.")
    try:
        return read()
    except Exception as error:  # of NumPy, PyTorch, pickle or a zip file
        reason = str(error).partition("\n")[0].rstrip(".") or type(error).__name__
        raise ValueError(f"read_plaid: {file} cannot be read ({reason}); build the index anew.") from error


def _array(file: Path) -> Any:
    if file.suffix == ".pt":
        return _readable(file, lambda: torch.load(file, map_location="cpu", mmap=True, weights_only=True))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return _readable(file, lambda: torch.from_numpy(np.load(file, mmap_mode="r")))
