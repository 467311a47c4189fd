"""An encoded corpus on disk. An interrupted call goes on where it was."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from pylate_fastmaxsim.codec import ResidualCodec
from pylate_fastmaxsim.files.record import read_record, write_record
from pylate_fastmaxsim.recipes.compression import needs_codec, train_codec
from pylate_fastmaxsim.recipes.errors import RecipeError, as_recipe_error
from pylate_fastmaxsim.recipes.files import hold_lock
from pylate_fastmaxsim.recipes.models.retriever import Encoded
from pylate_fastmaxsim.retrieval.corpus import Corpus, write_corpus
from pylate_fastmaxsim.retrieval.formats.description import DESCRIPTION_FILE as CORPUS_FILE
from pylate_fastmaxsim.retrieval.formats.format import CODEC_FILE, DTYPES
from pylate_fastmaxsim.retrieval.sparse.files import DESCRIPTION_FILE as SPARSE_FILE
from pylate_fastmaxsim.retrieval.sparse.index import SparseIndex

DESCRIPTION_FILE = "search.json"  # written first
LOCK_FILE = "lock"
FORMAT = "pylate-fastmaxsim search 2"
SPARSE_FOLDER = "sparse"
LATE_FOLDER = "documents"

# The documents from a position on, encoded as they are asked for.
EncodeFrom = Callable[[int], Iterator[Encoded]]
# Those that a codec is trained on.
EncodeSample = Callable[[], Iterator[Encoded]]


@dataclass(frozen=True)
class Description:
    """The origin of an index. Digests are the same for the same weights and settings, and for the same texts in order."""

    kind: str  # of the model
    model: str  # its name, for messages
    model_digest: str
    corpus_digest: str
    stored: str | None  # format of token embeddings on disk
    documents: int

    @property
    def is_sparse(self) -> bool:
        """Tell whether documents are sparse vectors."""
        return self.stored is None


def open_or_build(
    folder: Path,
    description: Description,
    encode_from: EncodeFrom,
    encode_sample: EncodeSample,
    device: torch.device,
) -> SparseIndex | Corpus:
    """The index in a folder, finished first where an earlier call was interrupted, and built where there is none.

    A finished index is only read: by several commands at once, and where the folder cannot be written. It must be of the
    same model and corpus.
    """
    # A damaged file, or a number that does not fit the format.
    with as_recipe_error("--index"):
        if (folder / DESCRIPTION_FILE).exists():
            _require_same(folder, description)
            if (found := _finished(folder, description, device)) is not None:
                return found
        with hold_lock("--index", folder / LOCK_FILE, f"{folder} is being built"):
            _describe(folder, description)
            if description.is_sparse:
                return SparseIndex.build(encode_from, folder=folder / SPARSE_FOLDER, device=device)
            return _build(folder, description.stored, encode_from, encode_sample)


def _finished(folder: Path, description: Description, device: torch.device) -> SparseIndex | Corpus | None:
    """The index in a folder, or None if it has fewer documents, as one that was damaged and repaired."""
    part, file = (SPARSE_FOLDER, SPARSE_FILE) if description.is_sparse else (LATE_FOLDER, CORPUS_FILE)
    if not (folder / part / file).exists():
        return None
    held = SparseIndex.load(folder / part, device) if description.is_sparse else Corpus(folder / part)
    return held if len(held) == description.documents else None


def _describe(folder: Path, description: Description) -> None:
    """Write the description of a new index, or refuse an index of something else."""
    if (folder / DESCRIPTION_FILE).exists():
        _require_same(folder, description)
        return
    if any(path.name != LOCK_FILE for path in folder.iterdir()):
        raise RecipeError(f"--index must be a folder for an index, but {folder} holds something else.")
    write_record(folder / DESCRIPTION_FILE, {"format": FORMAT, **asdict(description)})


def _require_same(folder: Path, description: Description) -> None:
    """Refuse an index of something else."""
    file = folder / DESCRIPTION_FILE
    try:
        found = read_record(file) or {}
    except ValueError as error:
        raise RecipeError(f"--index: {error} Remove {folder} to build it anew, or choose another folder.") from None
    if found.get("format") != FORMAT:
        raise RecipeError(f"--index: {file} must be of the format {FORMAT!r}, as fastmaxsim search writes it.")
    for key, other in (
        ("model_digest", f"another model ({found.get('model')}, or other weights or settings of {description.model})"),
        ("corpus_digest", "another corpus"),
        ("stored", f"--format {found.get('stored')}"),
    ):
        if found.get(key) != getattr(description, key):
            raise RecipeError(
                f"--index: {folder} was made with {other}; choose another folder, or remove it to build it anew."
            )


def _build(folder: Path, stored: str, encode_from: EncodeFrom, encode_sample: EncodeSample) -> Corpus:
    """The corpus on disk, the documents that are missing encoded."""
    corpus = folder / LATE_FOLDER
    if stored in DTYPES:
        return write_corpus(corpus, encode_from, DTYPES[stored])
    if not needs_codec(stored):
        return write_corpus(corpus, encode_from, format=stored)
    if (corpus / CODEC_FILE).exists():
        codec = ResidualCodec.load(corpus / CODEC_FILE)
    else:
        codec = train_codec(f"--format {stored}", stored, encode_sample())
    return write_corpus(corpus, encode_from, format=codec)
