"""Write an index of PLAID, as fast-plaid and PyLate read it, from documents of which few are in memory at a time."""

from __future__ import annotations

import json
import math
import os
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pylate_fastmaxsim.codec import ResidualCodec
from pylate_fastmaxsim.compressed import CompressedBatch, compress
from pylate_fastmaxsim.cpu.live_tokens import live_tokens
from pylate_fastmaxsim.files.replace import remove_scratch, replace_file
from pylate_fastmaxsim.files.resumed import resumed
from pylate_fastmaxsim.retrieval.corpus import Corpus
from pylate_fastmaxsim.retrieval.formats.format import Batch
from pylate_fastmaxsim.retrieval.formats.writer import live
from pylate_fastmaxsim.retrieval.plaid import (
    FAST_FOLDER,
    FAST_PLAID,
    IDS_FILE,
    METADATA_FILE,
    PlaidCorpus,
    lengths_file,
    read_codec,
    read_json,
    read_plaid,
    rows_file,
)
from pylate_fastmaxsim.tokens import TokenBatch, Tokens, token_batches

# The other way round, which PyLate needs as well.
NUMBERS_FILE = "documents_ids_to_plaid_ids.pkl"
# Written behind the codec, so that where it is the codec is whole.
PLAN_FILE = "plan.json"
# Of a chunk, which is held in memory: 72 MiB at 128 numbers of 4 bits.
TOKENS_PER_CHUNK = 1 << 20
TOKENS_PER_BATCH = 1 << 17
# That a codec is trained on: documents chosen at random.
SAMPLE_TOKENS = 1 << 20
# Vectors whose residuals are measured.
RESIDUALS = 50_000
# By default as PyLate's.
BITS = 4

Batches = Callable[[int], "Tokens | CompressedBatch | Iterable[Tokens | CompressedBatch]"]


def write_plaid(
    folder: str | os.PathLike,
    documents: Corpus | Batches,
    codec: ResidualCodec | None = None,
    *,
    ids: Sequence[Any] | None = None,
    device: str | torch.device | None = None,
) -> PlaidCorpus:
    """Write an index that ``pylate.indexes.PLAID`` and fast-plaid search and add to, and open it.

    The index is the one that fast-plaid writes for the same centroids and buckets, which however looks for the nearest
    centroid in float16. A chunk of 2**20 tokens at a time is in memory. Where a call is killed, the same call goes on behind
    its last chunk.

    Parameters
    ----------
    folder
        ``index_folder/index_name`` of PyLate: empty, yet to be made, or that of a call that was killed.
    documents
        A corpus; or a function that returns batches of documents as :func:`pylate_fastmaxsim.retrieval.search.search` takes
        them, called with the number of documents that are written already: it begins with the document of this number.
    codec
        Centroids and buckets. By default that of a corpus of residual codes, which are then taken as they are, else one of
        4 bits that is trained on 2**20 tokens of a corpus, with as many centroids as PLAID takes for all its tokens. A
        function needs one: ``ResidualCodec.train`` makes it of a sample.
    ids
        The id of each document, by which PyLate knows it. By default its number.
    device
        Where vectors are encoded; by default the GPU if there is one.

    Raises
    ------
    ValueError
        The folder holds something else, there are no tokens or another number of ids, or the codec is missing, for another d
        or not that of the call that was killed.
    TypeError
        Something in the batches is none.
    OSError
        Writing fails, as on a full disk.

    Examples
    --------
    >>> import tempfile, torch
    >>> from pylate.indexes import PLAID
    >>> from pylate_fastmaxsim import TokenBatch, write_plaid
    >>> from pylate_fastmaxsim.retrieval.corpus import write_corpus
    >>> documents = torch.nn.functional.normalize(torch.randn(50, 5, 16), dim=-1)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     corpus = write_corpus(f"{folder}/corpus", [documents])
    ...     written = write_plaid(f"{folder}/docs", corpus, ids=[f"d{number}" for number in range(50)], device="cpu")
    ...     index = PLAID(folder, "docs", device="cpu", show_progress=False)
    ...     index([documents[7]], k=1)[0][0]["id"], len(written), written.ids[:2]
    ('d7', 50, ['d0', 'd1'])
    """
    where, folder = "write_plaid", Path(folder)
    if (folder / FAST_FOLDER / METADATA_FILE).exists():
        raise ValueError(f"{where}: {folder} holds an index; choose another folder, or remove it.")
    if isinstance(documents, Corpus):
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        batches = partial(documents.batches, device, TOKENS_PER_BATCH)
    elif codec is None:
        raise ValueError(f"{where}: documents of a function need a codec; ResidualCodec.train makes it of a sample.")
    else:

        def batches(held: int) -> Iterator[Batch]:
            return token_batches(where, "documents", documents(held), CompressedBatch)

    def chosen() -> ResidualCodec:
        return codec or codec_of(documents, torch.arange(len(documents), device="cpu"), device)

    for _ in writing_plaid(where, folder, codec and codec.checksum, batches, chosen, ids):
        pass
    return read_plaid(folder)


def writing_plaid(
    where: str,
    folder: Path,
    source: Any,
    batches: Callable[[int], Iterable[Batch]],
    chosen: Callable[[], ResidualCodec],
    ids: Sequence[Any] | None,
) -> Iterator[int]:
    """Write an index, and yield after each chunk how many documents there are; first, how many there were.

    ``source``: of what, as :func:`pylate_fastmaxsim.files.resumed.resumed` keeps it.
    """
    with resumed(where, folder, source) as is_finished:
        index = folder / FAST_FOLDER
        index.mkdir(exist_ok=True)
        remove_scratch(index)
        lengths: list[list[int]] = []
        while (file := lengths_file(index, len(lengths))).exists():
            lengths.append(read_json(file))
        done = sum(map(len, lengths))
        yield done
        if is_finished:
            return
        if not (index / PLAN_FILE).exists():
            codec = chosen().to("cpu")
            arrays = {
                "centroids": codec.centroids,
                "bucket_cutoffs": codec.cutoffs,
                "bucket_weights": codec.weights.float(),
            }
            _write_arrays(index, arrays)
            _write_json(index / PLAN_FILE, {"nbits": codec.bits})
        codec = read_codec(index, FAST_PLAID, read_json(index / PLAN_FILE)["nbits"])
        for codes, packed, counts in _chunks(batches(done), codec):
            number, begin = len(lengths), sum(map(sum, lengths))
            _write_arrays(index, {f"{number}.codes": codes, f"{number}.residuals": packed})
            about = {"num_documents": len(counts), "num_embeddings": len(codes), "embedding_offset": begin}
            _write_json(index / f"{number}.metadata.json", about)
            _write_json(lengths_file(index, number), counts)  # which makes it a chunk
            lengths.append(counts)
            done += len(counts)
            yield done
        ids, tokens = range(done) if ids is None else ids, sum(map(sum, lengths))
        if len(ids) != done or not tokens:
            raise ValueError(
                f"{where}: there must be tokens, and an id for each document, got {tokens} tokens of {done} documents, and "
                f"{len(ids)} ids."
            )
        _write_lists(index, lengths, len(codec.centroids))
        _write_residuals(index, codec, batches(0))
        about = {"nbits": codec.bits, "num_chunks": len(lengths)}
        _write_json(index / PLAN_FILE, about)
        about |= {"num_partitions": len(codec.centroids), "num_embeddings": tokens, "num_documents": done}
        for name, pairs in ((IDS_FILE, enumerate(ids)), (NUMBERS_FILE, zip(ids, range(done), strict=True))):
            replace_file(folder / name, pickle.dumps(dict(pairs)))
        # Which makes it an index.
        _write_json(index / METADATA_FILE, about | {"avg_doclen": tokens / done, "compress_only": False})


def codec_of(corpus: Corpus, positions: Tensor, device: str | torch.device) -> ResidualCodec:
    """The codec of a corpus of residual codes, else one that is trained on some of its documents at these positions."""
    stored = corpus.parts[0].format
    if stored.codec and all(part.format == stored for part in corpus.parts):
        return stored.codec
    order = torch.randperm(len(positions), generator=torch.Generator().manual_seed(0), device="cpu")
    documents = math.ceil(SAMPLE_TOKENS / max(1, corpus.tokens) * len(corpus))
    blocks = corpus.blocks(positions[order[:documents]].sort().values, TOKENS_PER_BATCH)
    batches = (corpus.select(block, device) for block in blocks)
    sample = torch.cat(
        [(each if isinstance(each, TokenBatch) else each.decompress()).values.float() for each in batches]
    )
    centroids = 2 ** int(math.log2(16 * math.sqrt(max(1, corpus.tokens))))
    return ResidualCodec.train(sample, BITS, max(1, min(centroids, len(sample) * 19 // 20)))


def _chunks(batches: Iterable[Batch], codec: ResidualCodec) -> Iterator[tuple[Tensor, Tensor, list[int]]]:
    """Codes, packed buckets and the lengths of documents, of each chunk."""
    parts: list[tuple[Tensor, Tensor]] = []
    lengths: list[int] = []
    for batch in batches:
        batch = _coded(batch, codec)
        found = live_tokens(batch.starts, batch.lengths, batch.keep)
        parts.append((batch.tokens.codes[found.row].long().cpu(), batch.tokens.packed[found.row].cpu()))
        lengths += found.count.tolist()
        if sum(len(codes) for codes, _ in parts) >= TOKENS_PER_CHUNK:
            yield *map(torch.cat, zip(*parts, strict=True)), lengths
            parts, lengths = [], []
    if lengths:
        yield *map(torch.cat, zip(*parts, strict=True)), lengths


def _coded(batch: Batch, codec: ResidualCodec) -> CompressedBatch:
    """The residual codes of a batch: its own, if they are of the codec."""
    if isinstance(batch, CompressedBatch):
        if batch.format == "residual" and batch.tokens.codec.checksum == codec.checksum:
            return batch
        batch = batch.decompress()
    return compress(live(batch), codec.to(batch.device))


def _write_lists(index: Path, lengths: list[list[int]], centroids: int) -> None:
    """Write for each centroid the documents that have a token of it, ascending."""
    firsts = np.cumsum([0, *map(len, lengths)])

    def pairs(chunk: int) -> tuple[np.ndarray, np.ndarray]:
        """Centroids, ascending, and documents of each of their lists, ascending."""
        documents = np.repeat(np.arange(firsts[chunk], firsts[chunk + 1]), lengths[chunk])
        codes = np.load(rows_file(index, chunk, "codes"), mmap_mode="r")
        return np.divmod(np.unique(codes * firsts[-1] + documents), firsts[-1])

    counts = sum(np.bincount(pairs(chunk)[0], minlength=centroids) for chunk in range(len(lengths)))
    begins = np.cumsum(counts) - counts

    def write(file: str) -> None:
        lists = np.lib.format.open_memmap(file, "w+", np.int64, (int(counts.sum()),))
        free = begins.copy()
        for chunk in range(len(lengths)):
            codes, documents = pairs(chunk)
            here = np.bincount(codes, minlength=centroids)
            lists[free[codes] + np.arange(len(codes)) - (np.cumsum(here) - here)[codes]] = documents
            free += here
        lists.flush()

    replace_file(index / "ivf.npy", write)
    _write_arrays(index, {"ivf_lengths": torch.from_numpy(counts.astype(np.int32))})


def _write_residuals(index: Path, codec: ResidualCodec, batches: Iterable[Batch]) -> None:
    """Write how large residuals are: fast-plaid makes centroids of added vectors that are farther from all others."""
    found = (live(each if isinstance(each, TokenBatch) else each.decompress()).values[:RESIDUALS] for each in batches)
    vectors = torch.nn.functional.normalize(next(each for each in found if len(each)).float(), dim=-1)
    codec = codec.to(vectors.device)
    residuals = (vectors - codec.centroids[codec.encode(vectors)[0].long()].float()).cpu()
    threshold = residuals.norm(dim=1).quantile(0.75)[None]
    _write_arrays(index, {"avg_residual": residuals.abs().mean(dim=0), "cluster_threshold": threshold})


def _write_arrays(index: Path, arrays: dict[str, Tensor]) -> None:
    for name, array in arrays.items():
        replace_file(index / f"{name}.npy", partial(np.save, arr=array.numpy()))


def _write_json(file: Path, values: Any) -> None:
    replace_file(file, json.dumps(values).encode())
