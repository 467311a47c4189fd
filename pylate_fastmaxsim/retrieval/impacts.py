"""Sparse vectors from files of JSON lines, batch by batch."""

from collections.abc import Iterator, Mapping

from pylate_fastmaxsim._checks import require_count, require_integer
from pylate_fastmaxsim._impacts import Paths, read_columns
from pylate_fastmaxsim.sparse import SparseBatch


def read_impacts(
    paths: Paths,
    vocabulary: Mapping[str, int] | int,
    batch_size: int = 16384,
    *,
    size: int | None = None,
    start: int = 0,
) -> Iterator[tuple[list[str], SparseBatch]]:
    """Ids and vectors from files in the format of :meth:`SparseBatch.from_jsonl`, ``batch_size`` lines at a time.

    Parameters
    ----------
    paths, vocabulary, size
        As in :meth:`SparseBatch.from_jsonl`.
    batch_size
        Vectors of each batch but the last, at least 1.
    start
        How many vectors to pass over: those that an interrupted build of an index holds already.

    Returns
    -------
    Iterator
        Of pairs: a list of ids, and the ``SparseBatch`` of their vectors.

    Raises
    ------
    ValueError, TypeError, FileNotFoundError
        As in :meth:`SparseBatch.from_jsonl`, for a bad line once it is reached.

    Examples
    --------
    >>> from pathlib import Path
    >>> from pylate_fastmaxsim.retrieval.impacts import read_impacts
    >>> _ = Path("docs.jsonl").write_text(
    ...     '{"id": "a", "contents": "", "vector": {"sea": 1.5}}\\n{"id": "b", "contents": "", "vector": {"sky": 2}}\\n'
    ... )
    >>> for ids, batch in read_impacts("docs.jsonl", {"sea": 0, "sky": 1}, batch_size=1):
    ...     print(ids, batch.terms.tolist(), batch.weights.tolist())
    ['a'] [0] [1.5]
    ['b'] [1] [2.0]
    """
    where = "read_impacts"
    batch_size = require_count(where, "batch_size", batch_size)
    start = require_integer(f"{where}: start", start)
    size, batches = read_columns(where, paths, vocabulary, size, batch_size, start)
    return ((ids, SparseBatch._from_columns(where, *columns, size)) for ids, *columns in batches)
