"""Documents of an index with their ids: in memory, or in a folder as a corpus. A change is there as a whole or not at all."""

import secrets
from collections.abc import Iterator, Sequence
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
from pylate_fastmaxsim.retrieval.formats.format import BOUNDS, Format
from pylate_fastmaxsim.retrieval.formats.part import Part, mapped_part
from pylate_fastmaxsim.retrieval.formats.writer import Writer, empty
from pylate_fastmaxsim.retrieval.ids import Id, Ids, to_lines
from pylate_fastmaxsim.tokens import TokenBatch


class OfOnePart(Corpus):
    """A corpus of documents that are opened already."""

    def __init__(self, folder: Path, part: Part) -> None:
        self._set(folder, [part])


class Storage:
    """Documents in memory, in arrays that double when they are full."""

    corpus: Corpus | None = None  # None: nothing was added yet

    def __init__(self) -> None:
        self.ids = Ids()
        self._removed: set[int] = set()
        self._live: Tensor | None = None
        self._rows: dict[str, Tensor] = {}

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

    def add(self, format: Format, batch: TokenBatch, ids: list[Id]) -> None:
        """Add documents, whose tokens are all live, in the place of those with the same ids."""
        positions = self.ids.positions
        removed = self._removed | {positions[each] for each in ids if each in positions}
        self.corpus = self._written(format, batch, ids, removed)
        self.ids.append(ids)
        self._removed, self._live = removed, None

    def _write_removed(self, removed: set[int]) -> None:
        pass

    def _written(self, format: Format, batch: TokenBatch, ids: Sequence[Id], removed: set[int]) -> Corpus:
        """The corpus with a batch behind it."""
        held, tokens = len(self.ids.all), self.corpus.tokens if self.corpus else 0
        arrays = {name: array.cpu() for name, array in format.encode(batch).items()}
        if not self._rows:
            self._extend("bounds", 0, torch.zeros(1, dtype=torch.int64, device="cpu"))
        self._extend("bounds", held + 1, tokens + batch.lengths.cumsum(0).cpu())
        for name, array in arrays.items():
            self._extend(name, format.columns[name].rows(held, tokens), array)
        held, tokens = held + len(ids), tokens + len(batch.values)
        columns = (format.columns | {"bounds": BOUNDS}).items()
        views = {name: self._rows[name][: column.rows(held, tokens)] for name, column in columns}
        return OfOnePart(Path("memory"), Part(format, views, views.pop("bounds"), tokens, Path("memory")))

    def _extend(self, name: str, count: int, new: Tensor) -> None:
        """Write rows behind the first ``count``."""
        rows = self._rows.get(name, new[:0])
        if count + len(new) > len(rows):
            grown = torch.empty(max(2 * len(rows), count + len(new)), *new.shape[1:], dtype=new.dtype, device="cpu")
            grown[:count] = rows[:count]
            self._rows[name] = rows = grown
        rows[count : count + len(new)] = new


class Folder(Storage):
    """Documents in a folder, each change of which is a generation of its corpus."""

    def __init__(self, folder: Path, override: bool) -> None:
        super().__init__()
        self.folder = folder
        self._held: Held | None = None
        if override and folder.exists():
            with writing("Exact", folder):
                self._require_index()
                empty(folder)
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
        return held, OfOnePart(self.folder, part), part.read_ids()

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

    def _written(self, format: Format, batch: TokenBatch, ids: Sequence[Id], removed: set[int]) -> Corpus:
        held = self._held or Held(format, 0, 0, np.zeros(0, np.uint64), 0, secrets.token_hex(8), ids=0)
        with ExitStack() as files:
            writer = Writer(self.folder, held, files)
            writer.append(batch, to_lines(ids))
            self._held = writer.finish(sorted(removed))
        return OfOnePart(self.folder, mapped_part(self.folder, self._held))
