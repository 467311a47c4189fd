"""Documents as points of a collection of Qdrant, with multivectors that MaxSim scores, or with sparse vectors."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any
from uuid import NAMESPACE_OID, uuid5

import torch

from pylate_fastmaxsim._install import install_command
from pylate_fastmaxsim.export.source import Dense, Sparse
from pylate_fastmaxsim.retrieval.formats.format import Batch
from pylate_fastmaxsim.retrieval.ids import Id
from pylate_fastmaxsim.sparse import SparseBatch

VECTORS = "vectors"
# Of a request: at most about 20 MiB in JSON, where servers take 32.
NUMBERS, DOCUMENTS = 1 << 20, 256
SECONDS = 120


def to_qdrant(source: Dense | Sparse, at: str) -> Iterator[int]:
    """Write points to ``URL/COLLECTION``, or ``FOLDER/COLLECTION`` of local mode, and yield after each request how many
    documents there are; first, how many there were.

    The number of a point follows from its id, so that a point that is written twice is one. Requests are in order, each
    behind the answer to that before: where a call was killed, only points of its last request can be missing.
    """
    try:
        from qdrant_client import QdrantClient, models
        from qdrant_client.http.exceptions import ApiException
    except ImportError:
        raise ImportError(f"export: qdrant-client is missing: {install_command('qdrant')}.") from None

    def settings() -> dict[str, Any]:
        if isinstance(source, Sparse):
            return {"vectors_config": {}, "sparse_vectors_config": {VECTORS: models.SparseVectorParams()}}
        comparator = models.MultiVectorConfig(comparator=models.MultiVectorComparator.MAX_SIM)
        datatype = models.Datatype.FLOAT32 if source.corpus.dtype == torch.float32 else models.Datatype.FLOAT16
        params = {"distance": models.Distance.DOT, "multivector_config": comparator, "datatype": datatype}
        return {"vectors_config": {VECTORS: models.VectorParams(size=source.corpus.dim, **params)}}

    def vectors(batch: Batch | SparseBatch) -> list[Any]:
        """Of each document; None where it has no token or term."""
        if isinstance(batch, SparseBatch):
            lengths = batch.offsets.diff().tolist()
            pairs = zip(batch.terms.int().split(lengths), batch.weights.float().split(lengths), strict=True)
            found = [len(i) and models.SparseVector(indices=i.tolist(), values=v.tolist()) for i, v in pairs]
        else:
            rows, offsets = source.vectors(batch)
            found = [each.tolist() for each in rows.float().split(offsets.diff().tolist())]
        return [{VECTORS: each} if each else {} for each in found]

    place, _, name = at.rpartition("/")
    if not name or not place.rstrip("/:") or place.endswith(":/"):
        raise ValueError(f"export: Qdrant is given as URL/COLLECTION, as http://localhost:6333/docs, got {at}.")
    remote = {
        "url": place,
        "api_key": os.environ.get("QDRANT_API_KEY"),
        "timeout": SECONDS,
        "check_compatibility": False,
    }
    client = None
    try:
        client = QdrantClient(**remote) if "://" in place else QdrantClient(path=place)
        about = {"written_by": "pylate-fastmaxsim", "source": source.state}
        if not client.collection_exists(name):
            client.create_collection(name, **settings(), metadata=about)
        if client.get_collection(name).config.metadata != about:
            raise ValueError(
                f"export: {at} holds something else, or was written before the folder was changed (or the server is older "
                "than Qdrant 1.16, which keeps no metadata); choose another collection, or remove it."
            )
        done = client.count(name, exact=True).count
        yield done
        done = max(0, done - DOCUMENTS)
        most = max(1, NUMBERS // source.corpus.dim) if isinstance(source, Dense) else DOCUMENTS
        for ids, batch in source.with_ids(done, most):
            pairs = zip(ids, vectors(batch), strict=True)
            points = [models.PointStruct(id=_number(each), vector=v, payload={"id": each}) for each, v in pairs]
            for begin in range(0, len(points), DOCUMENTS):
                some = points[begin : begin + DOCUMENTS]
                client.upsert(name, some, wait=True)
                done += len(some)
                yield done
    except (ApiException, RuntimeError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise ConnectionError(
            f"export: {at} cannot be written ({reason}); what it holds stays, and the same command goes on from there."
        ) from None
    finally:
        if client is not None:
            client.close()


def _number(id: Id) -> int | str:
    """Qdrant knows points by unsigned numbers of 64 bits and by UUIDs."""
    return id if isinstance(id, int) and 0 <= id < 2**64 else str(uuid5(NAMESPACE_OID, str(id)))
