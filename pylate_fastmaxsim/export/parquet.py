"""Documents as files of Parquet, which LanceDB, DuckDB, Spark and most other systems read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, count, islice
from pathlib import Path

import numpy as np

from pylate_fastmaxsim._install import install_command
from pylate_fastmaxsim.export.source import Dense, Sparse
from pylate_fastmaxsim.files.replace import replace_file
from pylate_fastmaxsim.files.resumed import resumed
from pylate_fastmaxsim.retrieval.formats.format import Batch
from pylate_fastmaxsim.retrieval.ids import Id
from pylate_fastmaxsim.sparse import SparseBatch

# Of a group of rows, which is held in memory: 16 MiB of 128 numbers of 16 bits, or of sparse vectors with 250 terms.
TOKENS, DOCUMENTS = 1 << 16, 1 << 13
# Groups of a file, which is what a killed call loses at most.
GROUPS = 16


def to_parquet(source: Dense | Sparse, at: str) -> Iterator[int]:
    """Write numbered files to the folder ``at``, and yield after each how many documents there are; first, how many there were."""
    try:
        import pyarrow as pa
        from pyarrow.parquet import ParquetWriter, read_metadata
    except ImportError:
        raise ImportError(f"export: pyarrow is missing: {install_command('recipes')}.") from None

    folder = Path(at)
    id_type = pa.string() if isinstance(source.ids[0], str) else pa.int64()

    def table(ids: Sequence[Id], batch: Batch | SparseBatch) -> pa.Table:
        try:
            columns = {"id": pa.array(ids, id_type)}
        except (pa.ArrowException, OverflowError):
            raise ValueError("export: ids must be all strings, or all integers of 64 bits, as one column.") from None
        if isinstance(batch, SparseBatch):
            offsets, terms = pa.array(batch.offsets.numpy(), pa.int32()), batch.terms.numpy().astype(np.int32)
            columns["indices"] = pa.ListArray.from_arrays(offsets, pa.array(terms))
            columns["values"] = pa.ListArray.from_arrays(offsets, pa.array(batch.weights.float().numpy()))
        else:
            vectors, offsets = source.vectors(batch)
            rows = pa.FixedSizeListArray.from_arrays(pa.array(vectors.flatten().numpy()), vectors.shape[1])
            columns["vectors"] = pa.ListArray.from_arrays(pa.array(offsets.numpy(), pa.int32()), rows)
        return pa.table(columns)

    with resumed("export", folder, ["parquet", *source.state]):
        files = [*folder.glob("part-*.parquet")]
        done = sum(read_metadata(file).num_rows for file in files)
        yield done
        groups = (table(*each) for each in source.with_ids(done, TOKENS if isinstance(source, Dense) else DOCUMENTS))
        for number in count(len(files)):
            if (first := next(groups, None)) is None:
                break

            def write(file: str, first: pa.Table = first) -> None:
                nonlocal done
                with ParquetWriter(file, first.schema, compression="none", use_dictionary=["id"]) as writer:
                    for group in chain([first], islice(groups, GROUPS - 1)):
                        writer.write_table(group)
                        done += len(group)

            replace_file(folder / f"part-{number:05}.parquet", write)
            yield done
