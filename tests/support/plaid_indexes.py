"""Small indexes of PLAID, written by the libraries themselves, and what they hold, decompressed by the book."""

import contextlib
import io
import json
import multiprocessing
import os
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch
from fast_plaid.search import FastPlaid

# PyLate changes the whole process here: parallel tokenizers, with which workers that are forked wait forever, and spawn as
# the way to start workers.
start_method = multiprocessing.get_start_method(allow_none=True)
with mock.patch.dict(os.environ):
    from pylate.indexes import PLAID
    from pylate.indexes.stanford_nlp import Indexer, IndexUpdater
    from pylate.indexes.stanford_nlp.infra import ColBERTConfig
multiprocessing.set_start_method(start_method, force=True)

__all__ = ["DIM", "PLAID", "merge_chunks", "stored_vectors", "unit_vectors", "write_fast_plaid", "write_stanford"]

DIM = 32


def unit_vectors(*sizes: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.functional.normalize(torch.randn(size, DIM, generator=generator), dim=-1) for size in sizes]


def write_fast_plaid(folder: Path, documents: list[torch.Tensor], bits: int, documents_per_chunk: int) -> FastPlaid:
    """An index that an update does not build anew."""
    index = FastPlaid(str(folder), device="cpu")
    return index.create(documents, nbits=bits, batch_size=documents_per_chunk, start_from_scratch=0)


def merge_chunks(folder: Path) -> None:
    """Make of an index of fast-plaid 1.4.6 what fast-plaid 1.7.0 makes of it when it loads it."""
    metadata = json.loads((folder / "metadata.json").read_text())
    lengths = [json.loads((folder / f"doclens.{chunk}.json").read_text()) for chunk in range(metadata["num_chunks"])]
    flat = sum(lengths, [])
    for name in ("codes", "residuals"):
        files = [folder / f"{chunk}.{name}.npy" for chunk, documents in enumerate(lengths) if documents]
        chunks = [np.load(file) for file in files]
        padding = np.zeros((max(flat) - flat[-1], *chunks[0].shape[1:]), chunks[0].dtype)
        np.save(folder / f"merged_{name}.npy", np.concatenate([*chunks, padding]))
        manifest = {}
        for file, rows in zip(files, chunks, strict=True):
            manifest[file.name] = {"rows": len(rows), "merged": True, "mtime": None}
            file.unlink()
        (folder / f"merged_{name}.manifest.json").write_text(json.dumps(manifest))
    (folder / "metadata.json").write_text(json.dumps(metadata | {"frozen": True, "mutable": True}, indent=2))


def write_stanford(root: Path, documents: list[torch.Tensor], bits: int, removed: list[int]) -> Path:
    """An index of PyLate's Stanford code, from which PyLate removes documents."""
    config = ColBERTConfig(nbits=bits, root=str(root), index_root=str(root), overwrite=True, kmeans_niters=4, dim=DIM)
    folder = root / "index"
    folder.mkdir(parents=True)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        Indexer(config=config).index(name="index", collection=[d.numpy() for d in documents], overwrite=True)
        # In place of a Searcher, which compiles C++ for a minute.
        codes, residuals = torch.empty(0, dtype=torch.int32), torch.empty(0, DIM * bits // 8, dtype=torch.uint8)
        added = SimpleNamespace(codes=codes, residuals=residuals)
        ranker = SimpleNamespace(doclens=torch.tensor([len(d) for d in documents]), embeddings=added)
        updater = IndexUpdater(config, SimpleNamespace(index=str(folder), ranker=ranker))
        updater.removed_pids = removed
        updater.persist_to_disk()
    return folder


def stored_vectors(folder: Path) -> list[np.ndarray]:
    """The documents of an index in its order, ``[L, d]`` each, float64: centroid + bucket weights, of length 1."""
    metadata = json.loads((folder / "metadata.json").read_text())
    is_fast = (folder / "centroids.npy").exists()
    bits = metadata["nbits"] if is_fast else metadata["config"]["nbits"]

    def read(name: str) -> np.ndarray:
        return np.load(folder / f"{name}.npy") if is_fast else torch.load(folder / f"{name}.pt").numpy()

    centroids = read("centroids")
    weights = read("bucket_weights") if is_fast else torch.load(folder / "buckets.pt")[1].numpy()
    documents = []
    for chunk in range(metadata["num_chunks"]):
        codes, packed = (read(f"{chunk}.{name}") for name in ("codes", "residuals"))
        digits = np.unpackbits(packed, axis=1).reshape(len(packed), DIM, bits)
        buckets = (digits.astype(int) << np.arange(bits)).sum(axis=2)  # the lowest bit comes first
        sums = centroids.astype(np.float64)[codes] + weights.astype(np.float16).astype(np.float64)[buckets]
        vectors = sums / np.linalg.norm(sums, axis=1, keepdims=True)
        lengths = json.loads((folder / f"doclens.{chunk}.json").read_text())
        documents += np.split(vectors, np.cumsum(lengths)[:-1]) if lengths else []
    return documents
