"""A sparse index on disk: a safetensors file for each block, and a description that is written last."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from pylate_fastmaxsim.files.replace import replace_file
from pylate_fastmaxsim.kernels.sparse import postings
from pylate_fastmaxsim.sparse import SparseBatch

DESCRIPTION_FILE = "index.json"
FORMAT = "pylate-fastmaxsim sparse index 1"
DTYPES = {"float16": torch.float16, "float32": torch.float32}

# Number of the block and of its documents. A block that is filled up is another file, so that the description of before
# holds until the new one is there.
_BLOCK_FILE = re.compile(r"block-(\d{8})-(\d+)\.safetensors")


@dataclass(frozen=True)
class Description:
    """What ``index.json`` says."""

    vocabulary: int
    dtype: torch.dtype  # of weights
    documents: list[int]  # of each block
    removed: list[int]  # positions, ascending


def stamp(folder: Path) -> tuple[int, int] | None:
    """Changes whenever ``index.json`` is written; None without one."""
    try:
        status = (folder / DESCRIPTION_FILE).stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return status.st_ino, status.st_mtime_ns


def write_block(folder: Path, number: int, block: SparseBatch) -> None:
    """Write a block. The file appears when it is complete."""
    file = _block_file(folder, number, len(block))
    tensors = {name: getattr(block, name).cpu() for name in ("offsets", "terms", "weights")}
    metadata = {"format": FORMAT, "vocabulary": str(block.vocabulary)}
    # Not save_file, whose files nobody else can read.
    replace_file(file, save(tensors, metadata))


def has_block(folder: Path, number: int, block: SparseBatch) -> bool:
    return _block_file(folder, number, len(block)).exists()


def read_block(where: str, folder: Path, number: int, documents: int) -> SparseBatch:
    """A block on the CPU, mapped into memory: what is not used is not read.

    ValueError, which names the file, if it is missing, truncated or of something else.
    """
    file = _block_file(folder, number, documents)
    try:
        with safe_open(file, framework="pt") as opened:
            metadata = opened.metadata() or {}
            vocabulary = int(metadata.get("vocabulary", 0)) if metadata.get("format") == FORMAT else 0
            tensors = [opened.get_tensor(name) for name in ("offsets", "terms", "weights") if vocabulary]
    except FileNotFoundError:  # also of a file without the permission to read it
        reason = "cannot be read" if file.exists() else "is missing; build the index again"
        raise ValueError(f"{where}: {file} {reason}.") from None
    except SafetensorError as error:
        raise ValueError(f"{where}: {file} is truncated or damaged ({error}); build the index again.") from None
    if not tensors or len(tensors[0]) != documents + 1 or int(tensors[0][-1]) != len(tensors[1]):
        raise ValueError(
            f"{where}: {file} is no block of {documents} documents of a sparse index; build the index again."
        )
    return SparseBatch._trusted(*tensors, vocabulary)


def finished_blocks(folder: Path) -> list[int]:
    """How many documents each block has that the folder holds, whether or not there is a description.

    That is the state of a build that was interrupted. Only the last block may be less than full.
    """
    found: dict[int, int] = {}
    for file in folder.glob("block-*"):
        if name := _BLOCK_FILE.fullmatch(file.name):
            number, documents = map(int, name.groups())
            found[number] = max(documents, found.get(number, 0))
    sizes: list[int] = []
    while (size := found.get(len(sizes))) and (not sizes or sizes[-1] == postings.DOCUMENTS_PER_BLOCK):
        sizes.append(size)
    return sizes


def is_complete(folder: Path) -> bool:
    return (folder / DESCRIPTION_FILE).exists()


def write_description(folder: Path, description: Description) -> None:
    """Write what makes the blocks an index, and delete the blocks that it no longer names."""
    values = {
        "format": FORMAT,
        "vocabulary": description.vocabulary,
        "weights": next(name for name, dtype in DTYPES.items() if dtype == description.dtype),
        "documents_per_block": postings.DOCUMENTS_PER_BLOCK,
        "documents": description.documents,
        "removed": description.removed,
    }
    text = json.dumps(values) + "\n"
    replace_file(folder / DESCRIPTION_FILE, text.encode())
    named = {_block_file(folder, number, size) for number, size in enumerate(description.documents)}
    for file in folder.glob("block-*"):
        if file not in named and _BLOCK_FILE.fullmatch(file.name):
            file.unlink()


def read_description(where: str, folder: Path) -> Description:
    """What ``index.json`` says; ValueError if it is missing or of another format."""
    file = folder / DESCRIPTION_FILE
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(
            f"{where}: {folder} holds no complete index, since it has no {file.name}, which is written last; "
            "an interrupted build goes on with SparseIndex.build."
        ) from None
    except ValueError:
        values = None
    try:
        if values["format"] != FORMAT:
            raise ValueError
        per_block, documents, removed = (values[name] for name in ("documents_per_block", "documents", "removed"))
        description = Description(values["vocabulary"], DTYPES[values["weights"]], documents, removed)
        if not {*map(type, [*documents, *removed])} <= {int} or sorted({*removed}) != removed:
            raise ValueError
        if removed and not 0 <= removed[0] <= removed[-1] < sum(documents):
            raise ValueError
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"{where}: {file} must be of the format {FORMAT!r}, as SparseIndex.save writes it.") from None
    if per_block != postings.DOCUMENTS_PER_BLOCK:
        raise ValueError(
            f"{where}: {file} has blocks of {per_block} documents, but this release has "
            f"{postings.DOCUMENTS_PER_BLOCK}; build the index again."
        )
    return description


def _block_file(folder: Path, number: int, documents: int) -> Path:
    return folder / f"block-{number:08}-{documents}.safetensors"
