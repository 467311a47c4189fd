"""Documents of an index with their ids: in memory, or in a folder as a corpus. A change is there as a whole or not at all."""

import secrets
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pylate_fastmaxsim.files.lock import holds_something, writing
from pylate_fastmaxsim.files.record import read_again_if_replaced
from pylate_fastmaxsim.retrieval.corpus import Corpus
from pylate_fastmaxsim.retrieval.formats import description
from pylate_fastmaxsim.retrieval.formats.description import DESCRIPTION_FILE, JOURNAL_FILE, Held
from pylate_fastmaxsim.retrieval.formats.format import BOUNDS, Arrays, Format
from pylate_fastmaxsim.retrieval.formats.part import Part, mapped_part
from pylate_fastmaxsim.retrieval.formats.writer import Writer, clear
from pylate_fastmaxsim.retrieval.ids import Id, Ids, to_lines
from pylate_fastmaxsim.tokens import TokenBatch

# Where errors would name a file.
IN_MEMORY = Path("memory")


class Storage:
    """Documents in memory, in parts of which each has room for as many as all before it: none is copied again."""

    corpus: Corpus | None = None  # None: nothing was added yet

    def __init__(self) -> None:
        self.ids = Ids()
        self._removed: set[int] = set()
        self._live: Tensor | None = None
        self._room: Arrays = {}  # of the last part

    @property
    def format(self) -> Format | None:
        return self.corpus and self.corpus.parts[0].format

    @property
    def live(self) -> Tensor:
        """Positions of the documents that are not removed, ascending, int64, on the CPU."""
        if self._live is None:
            self._live = torch.tensor([*self.ids.positions.values()], dtype=torch.int64, device="cpu")
        return self._live

    def changing(self, where: str) -> AbstractContextManager[None]:
        """Keep other processes from changing it meanwhile, and take over what they have changed."""
        return nullcontext()

    def remove(self, ids: Sequence[Id]) -> None:
        removed = self._removed | {self.ids.positions[each] for each in ids}
        self._write_removed(removed)
        self._removed, self._live = removed, None
        for each in ids:
            del self.ids.positions[each]

    def add(self, format: Format, batches: Iterable[TokenBatch], ids: list[Id]) -> None:
        """Add documents, whose tokens are all live, in the place of those with the same ids: all batches or none."""
        positions = self.ids.positions
        removed = self._removed | {positions[each] for each in ids if each in positions}
        self.corpus = self._written(format, batches, ids, removed)
        self.ids.append(ids)
        self._removed, self._live = removed, None

    def _write_removed(self, removed: set[int]) -> None:
        pass

    def _written(self, format: Format, batches: Iterable[TokenBatch], ids: Sequence[Id], removed: set[int]) -> Corpus:
        """The corpus with batches behind it."""
        parts, room = [*self.corpus.parts] if self.corpus else [], self._room
        columns = format.columns | {"bounds": BOUNDS}
        for batch in batches:
            arrays = {name: array.cpu() for name, array in format.encode(batch).items()}
            added = np.array([len(batch), len(batch.values)])
            begin = np.array([len(parts[-1]), parts[-1].tokens] if parts else [0, 0])
            if not parts or any(column.rows(*begin + added) > len(room[name]) for name, column in columns.items()):
                sizes = np.maximum(added, np.sum([[len(part), part.tokens] for part in parts], axis=0, dtype=np.int64))
                room = {
                    name: torch.empty(column.shape(*sizes.tolist()), dtype=column.dtype, device="cpu")
                    for name, column in columns.items()
                }
                room["bounds"][0] = 0
                parts.append(None)
                begin = np.zeros_like(added)
            arrays["bounds"] = begin[1] + batch.lengths.cumsum(0).cpu()
            end, views = begin + added, {}
            for name, column in columns.items():
                room[name][column.rows(*begin) : column.rows(*end)] = arrays[name]
                views[name] = room[name][: column.rows(*end)]
            parts[-1] = Part(format, views, views.pop("bounds"), int(end[1]), IN_MEMORY)
        self._room = room
        return Corpus(IN_MEMORY, _parts=parts)


class Folder(Storage):
    """Documents in a folder, each change of which is a generation of its corpus."""

    def __init__(self, folder: Path, override: bool) -> None:
        super().__init__()
        self.folder = folder
        self._held: Held | None = None
        if override and folder.exists():
            with writing("Exact", folder):
                self._require_index()
                clear(folder)
        self.read()

    def read(self) -> None:
        """Take over what is there, unless it is known. ValueError if that is no index, or is damaged."""
        found = read_again_if_replaced(self.folder / DESCRIPTION_FILE, self._found)
        if found is not None:
            self._held, self.corpus, ids = found
            self._removed, self._live = set(self._held.removed), None
            self.ids = Ids(ids, self._removed)

    def _found(self) -> tuple[Held, Corpus, list[Id]] | None:
        held, known = self._require_index(), self._held
        if known is not None and (held is None or held.identity != known.identity):
            raise ValueError(f"Exact: {self.folder} was begun anew by another process; open it again.")
        if held is None or (known is not None and held.generation == known.generation):
            return None
        part = mapped_part(self.folder, held)
        return held, Corpus(self.folder, _parts=[part]), part.read_ids()

    def _require_index(self) -> Held | None:
        """The description; None where no batch was ever finished. ValueError if the folder holds something else."""
        held = description.read(self.folder)
        begun = held or description.read_unfinished(self.folder)
        if begun is not None and begun.ids is None:
            raise ValueError(f"Exact: {self.folder} holds token embeddings without ids; choose another folder.")
        if (
            held
            or (self.folder / JOURNAL_FILE).exists()
            or not self.folder.exists()
            or not holds_something(self.folder)
        ):
            return held
        raise ValueError(
            f"Exact: {self.folder} holds no index, since it has no {DESCRIPTION_FILE}; choose another folder."
        )

    @contextmanager
    def changing(self, where: str) -> Iterator[None]:
        with writing(where, self.folder):
            self.read()
            yield

    def _write_removed(self, removed: set[int]) -> None:
        self._held = description.finish(self.folder, self._held._replace(removed=sorted(removed)))

    def _written(self, format: Format, batches: Iterable[TokenBatch], ids: Sequence[Id], removed: set[int]) -> Corpus:
        held = self._held or Held(format, 0, 0, np.zeros(0, np.uint64), 0, secrets.token_hex(8), ids=0)
        with ExitStack() as files:
            writer = Writer(self.folder, held, files)
            for number, batch in enumerate(batches):
                writer.append(batch, b"" if number else to_lines(ids))
            self._held = writer.finish(sorted(removed))
        return Corpus(self.folder, _parts=[mapped_part(self.folder, self._held)])
