"""A sparse index on disk: a safetensors file for each block, and a description that is written last."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from pylate_fastmaxsim.files.lock import holds_something
from pylate_fastmaxsim.files.record import read_record, write_record
from pylate_fastmaxsim.files.replace import replace_file
from pylate_fastmaxsim.kernels.sparse import postings
from pylate_fastmaxsim.retrieval.ids import Id, to_lines
from pylate_fastmaxsim.sparse import SparseBatch

DESCRIPTION_FILE = "index.json"
# Of a build or an addition that has not ended: the blocks that it has written.
UNFINISHED_FILE = "unfinished.json"
# Of an index without ids, and with them, which older releases would take for damage.
FORMATS = ("pylate-fastmaxsim sparse index 2", "pylate-fastmaxsim sparse index 3")
_PARTS = ("offsets", "terms", "weights")


@dataclass(frozen=True)
class Block:
    """Line of a description about a block."""

    documents: int
    entries: int
    checksum: str

    def file(self, folder: Path, number: int) -> Path:
        # With the checksum, so that no reader finds new content under an old name.
        return folder / f"block-{number:08}-{self.checksum}.safetensors"


class State(NamedTuple):
    """The identity of an index, and how often it was written."""

    identity: str
    written: int

    @property
    def next(self) -> State:
        return State(self.identity, self.written + 1)


@dataclass(frozen=True)
class Description:
    """Contents of ``index.json``."""

    vocabulary: int
    dtype: torch.dtype  # of weights
    blocks: list[Block]
    removed: list[int]  # positions, ascending
    state: State
    has_ids: bool  # whether blocks hold ids of their documents

    @property
    def documents(self) -> int:
        return sum(block.documents for block in self.blocks)


@dataclass
class Stored:
    """Where an index is on disk, if anywhere: of a block there its line, and the state of the description."""

    folder: Path | None = None
    written: dict[int, Block] = field(default_factory=dict)
    state: State = field(default_factory=lambda: State(secrets.token_hex(8), 0))

    def has(self, number: int, block: SparseBatch) -> bool:
        line = self.written.get(number)
        return line is not None and line.documents == len(block) and line.file(self.folder, number).exists()

    def write(self, number: int, block: SparseBatch, ids: Sequence[Id] | None) -> Block:
        """Write a block, with ids of its documents if there are any. The file appears when it is complete."""
        tensors = {name: getattr(block, name).cpu().contiguous() for name in _PARTS}
        if ids is not None:
            tensors["ids"] = torch.frombuffer(bytearray(to_lines(ids)), dtype=torch.uint8)
        line = self.written[number] = described(tensors)
        # One key, since safetensors writes several in random order.
        write = partial(save_file, tensors, metadata={"format": FORMATS[ids is not None]})
        replace_file(line.file(self.folder, number), write)
        return line

    def to_save(self, where: str, folder: Path) -> Stored:
        """What is in a folder already. ValueError if others have written it, or it holds something else."""
        if self.folder is None or folder.resolve() != self.folder.resolve():
            if holds_something(folder):
                raise ValueError(
                    f"{where}: {folder} must be empty, or the folder that this index is from; choose another folder, or "
                    "remove what it holds."
                )
            return Stored(folder)
        # The index, or else what a build has begun.
        begun = (read_description(where, folder, name, missing=True) for name in (DESCRIPTION_FILE, UNFINISHED_FILE))
        if (held := next(filter(None, begun), None)) and held.state != self.state:
            raise ValueError(
                f"{where}: {folder} was written by others since this index was loaded or saved; load it again, or save "
                "in another folder."
            )
        return Stored(folder, dict(self.written), self.state)


def described(tensors: dict[str, Tensor]) -> Block:
    """A block's line of the description, with the checksum of its numbers."""
    digest = xxhash.xxh3_64()
    for tensor in tensors.values():
        digest.update(tensor.view(torch.uint8).numpy())
    return Block(len(tensors["offsets"]) - 1, len(tensors["terms"]), digest.hexdigest())


def read_block(
    where: str, folder: Path, number: int, line: Block, vocabulary: int
) -> tuple[SparseBatch, Tensor | None]:
    """A block on the CPU, mapped into memory, and its lines of ids, if it has some.

    ValueError, which names the file, if it is missing, truncated or damaged. Numbers that are not those that were written
    must not reach native code.
    """
    file = line.file(folder, number)
    try:
        with safe_open(file, framework="pt") as opened:
            names = [*_PARTS, *({"ids"} & {*opened.keys()})]
            tensors = {name: opened.get_tensor(name) for name in names}
    except FileNotFoundError:  # also of a file without the permission to read it
        reason = "cannot be read" if file.exists() else "is missing; build the index again"
        raise ValueError(f"{where}: {file} {reason}.") from None
    except (SafetensorError, OSError, ValueError, AttributeError, RuntimeError, TypeError) as error:
        raise ValueError(f"{where}: {file} is truncated or damaged ({error}); build the index again.") from None
    if described(tensors) != line:
        raise ValueError(f"{where}: {file} is damaged; build the index again.")
    return SparseBatch._trusted(*(tensors[name] for name in _PARTS), vocabulary), tensors.get("ids")


def write_description(folder: Path, description: Description, *, unfinished: bool = False) -> None:
    """Write what makes the blocks an index. Deletes the blocks that neither it nor the description before names."""
    values = {
        "format": FORMATS[description.has_ids],
        "state": description.state,
        "vocabulary": description.vocabulary,
        "weights": str(description.dtype).removeprefix("torch."),
        "documents_per_block": postings.DOCUMENTS_PER_BLOCK,
        "blocks": [[block.documents, block.entries, block.checksum] for block in description.blocks],
        "removed": description.removed,
    }
    if unfinished:
        write_record(folder / UNFINISHED_FILE, values)
        return
    try:
        before = read_description("", folder, missing=True)
    except ValueError:
        before = None
    write_record(folder / DESCRIPTION_FILE, values)
    (folder / UNFINISHED_FILE).unlink(missing_ok=True)
    # Who reads the description before may not have opened its blocks.
    named = {
        block.file(folder, number) for each in (before, description) if each for number, block in enumerate(each.blocks)
    }
    for file in folder.glob("block-*.safetensors"):
        if file not in named:
            file.unlink()


def sound_part(where: str, folder: Path, description: Description) -> tuple[Description, str | None]:
    """Describe the blocks before the first that is damaged, and say what is wrong with that one, if there is one."""
    for number, line in enumerate(description.blocks):
        try:
            read_block(where, folder, number, line, description.vocabulary)
        except ValueError as error:
            sound = replace(description, blocks=description.blocks[:number], state=description.state.next)
            removed = [position for position in description.removed if position < sound.documents]
            return replace(sound, removed=removed), str(error)
    return description, None


def read_unfinished(where: str, folder: Path) -> Description | None:
    """Read what an interrupted build has written, or else the index; None if there is neither."""
    complete = read_description(where, folder, missing=True)
    begun = read_description(where, folder, UNFINISHED_FILE, missing=True)
    if begun and complete and begun.state != complete.state.next:
        begun = None  # the index was saved since
    return begun or complete


def read_description(
    where: str, folder: Path, name: str = DESCRIPTION_FILE, *, missing: bool = False
) -> Description | None:
    """Read a description; ValueError if it is of another format, or missing unless it may be."""
    file = folder / name
    try:
        values = read_record(file)
        if values is not None and values.get("format") not in FORMATS:
            raise ValueError
    except (ValueError, OSError):
        raise ValueError(
            f"{where}: {file} is damaged, or of another release; put it back, or build the index in another folder."
        ) from None
    if values is None:
        if missing:
            return None
        raise ValueError(
            f"{where}: {folder} holds no complete index, since it has no {file.name}, which is written last; "
            "an interrupted build goes on with SparseIndex.build."
        )
    if values["documents_per_block"] != postings.DOCUMENTS_PER_BLOCK:
        raise ValueError(
            f"{where}: {file} has blocks of {values['documents_per_block']} documents, but this release has "
            f"{postings.DOCUMENTS_PER_BLOCK}; build the index again."
        )
    return Description(
        values["vocabulary"],
        getattr(torch, values["weights"]),
        [Block(*line) for line in values["blocks"]],
        values["removed"],
        State(*values["state"]),
        values["format"] == FORMATS[True],
    )
