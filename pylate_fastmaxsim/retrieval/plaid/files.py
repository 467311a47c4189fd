"""Files of an index of PLAID, as fast-plaid and Stanford's code write them, checked and mapped into memory."""

from __future__ import annotations

import json
import pickle
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

METADATA_FILE = "metadata.json"
# In the folder of an index, PyLate has that of fast-plaid and what it knows of ids.
FAST_FOLDER = "fast_plaid_index"
IDS_FILE = "plaid_ids_to_documents_ids.pkl"
# Files of the rows of all chunks.
MERGED = "merged_"
KNOWN = "fast-plaid 1.4.6 to 1.7.0 and Stanford's ColBERT"

HALVES = (torch.float16, torch.float32)
WHOLE = (torch.int32, torch.int64)

Buckets = tuple[Any, Any, Any]  # centroids, weights, cutoffs


@dataclass(frozen=True)
class Layout:
    """How a library names its files, and how they are read."""

    suffix: str
    buckets_file: str
    read: Callable[[Path], Any]
    bits: Callable[[dict[str, Any]], Any]
    buckets: Callable[[Path], Buckets]

    @property
    def centroids_file(self) -> str:
        return f"centroids.{self.suffix}"


def plaid_folder(folder: Path) -> Path:
    """The folder with the files of an index, where ``folder`` may be that of PyLate. ValueError if there is none."""
    for each in (folder / FAST_FOLDER, folder):
        if (each / METADATA_FILE).exists():
            return each
    raise ValueError(
        f"read_plaid: {folder} must hold an index of PLAID, with {METADATA_FILE} in it or in {FAST_FOLDER}, as PyLate, "
        "fast-plaid and ColBERT write it."
    )


def layout_of(folder: Path) -> Layout:
    """By which library an index is. ValueError if it is none of those that are known."""
    for layout in (FAST_PLAID, STANFORD):
        if (folder / layout.centroids_file).exists():
            return layout
    raise _unknown_layout(folder, f"{FAST_PLAID.centroids_file} or {STANFORD.centroids_file}")


def read_sizes(folder: Path, layout: Layout) -> tuple[int, int, bool]:
    """Bits of each number, the number of chunks, and whether rows may be in files of all chunks only."""
    file = folder / METADATA_FILE
    metadata = read_json(file)
    metadata = metadata if isinstance(metadata, dict) else {}
    bits, chunks, merged = layout.bits(metadata), metadata.get("num_chunks"), bool(metadata.get("frozen"))
    if bits is None or chunks is None:
        raise _unknown_layout(folder, f"nbits and num_chunks in {METADATA_FILE}")
    if bits not in (1, 2, 4) or not isinstance(chunks, int) or chunks < 1:
        raise ValueError(
            f"read_plaid: {file} must say nbits, 1, 2 or 4, and num_chunks, from 1, but says {bits!r} and {chunks!r}."
        )
    first = [lengths_file(folder, 0), *(rows_file(folder, 0, name, layout, merged) for name in ("codes", "residuals"))]
    if (lacking := next((file.name for file in first if not file.exists()), None)) is not None:
        raise _unknown_layout(folder, lacking)
    return bits, chunks, merged


def _unknown_layout(folder: Path, lacking: str) -> ValueError:
    return ValueError(f"read_plaid: {folder} has a layout that is not known, without {lacking}; known are {KNOWN}.")


def lengths_file(folder: Path, chunk: int) -> Path:
    return folder / f"doclens.{chunk}.json"


def rows_file(folder: Path, chunk: int, name: str, layout: Layout, merged: bool) -> Path:
    """Where the codes or residuals of a chunk are.

    fast-plaid 1.7, and ``freeze()`` from 1.4.7 on, keep all chunks in one file, and only what changed since in its own.
    """
    own = folder / f"{chunk}.{name}.{layout.suffix}"
    return folder / f"{MERGED}{name}.{layout.suffix}" if merged and not own.exists() else own


def read_buckets(folder: Path, layout: Layout, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Centroids ``[C, d]``, weights ``[2**bits]`` and cutoffs ``[2**bits - 1]``."""
    centroids, weights, cutoffs = layout.buckets(folder)
    require(folder / layout.centroids_file, centroids, HALVES, (None, None))
    require(folder / layout.buckets_file, weights, HALVES, (2**bits,))
    require(folder / layout.buckets_file, cutoffs, HALVES, (2**bits - 1,))
    return centroids, weights, cutoffs


def read_ids(folder: Path) -> dict[int, Any] | None:
    """The id of each document by its number in the index, as PyLate keeps them; None where it has not written them."""
    file = ids_file(folder)
    if not file.exists():
        return None
    with open(file, "rb") as opened:
        ids = _readable(file, lambda: _PlainUnpickler(opened).load())
    if not isinstance(ids, dict):
        raise ValueError(f"read_plaid: {file} must hold a mapping from numbers to ids, as PyLate writes it.")
    return ids


def ids_file(folder: Path) -> Path:
    return (folder.parent if folder.name == FAST_FOLDER else folder) / IDS_FILE


class _PlainUnpickler(pickle.Unpickler):
    """Unpickle plain values only; what names a class or a function could run anything."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"ids must be strings or integers, but it names {module}.{name}")


def require(file: Path, tensor: Any, dtypes: tuple[torch.dtype, ...], shape: tuple[int | None, ...]) -> None:
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


def _npy(file: Path) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return _readable(file, lambda: torch.from_numpy(np.load(file, mmap_mode="r")))


def _pt(file: Path) -> Any:
    return _readable(file, lambda: torch.load(file, map_location="cpu", mmap=True, weights_only=True))


def _npy_buckets(folder: Path) -> Buckets:
    return tuple(_npy(folder / f"{name}.npy") for name in ("centroids", "bucket_weights", "bucket_cutoffs"))


def _pt_buckets(folder: Path) -> Buckets:
    buckets = _pt(folder / "buckets.pt")
    cutoffs, weights = buckets if isinstance(buckets, tuple) and len(buckets) == 2 else (None, None)
    return _pt(folder / "centroids.pt"), weights, cutoffs


def _pt_bits(metadata: dict[str, Any]) -> Any:
    config = metadata.get("config")
    return config.get("nbits") if isinstance(config, dict) else None


FAST_PLAID = Layout("npy", "bucket_weights.npy", _npy, lambda metadata: metadata.get("nbits"), _npy_buckets)
STANFORD = Layout("pt", "buckets.pt", _pt, _pt_bits, _pt_buckets)
