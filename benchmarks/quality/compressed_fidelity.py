"""What compressed documents keep of the exact ranking of Cranfield.

    python -m benchmarks compressed_fidelity --data FOLDER    # measure what is missing, then print the table

Outputs of all-MiniLM-L6-v2 are the token vectors, as in the suite static_cranfield. Codecs are trained on tokens of the
documents. Shares are of the 10 and the 100 documents that float32 ranks first, on average over the queries, and nDCG@10 is
of the judged queries. Rescored: of the best 4 k by compressed scores the best k by those of float32; of nDCG@10 k is 100.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import cached_property

import torch
from torch import Tensor

from benchmarks.harness.tables import table
from benchmarks.quality.static_cranfield import DEPTH, Task, add_options  # noqa: F401
from pylate_fastmaxsim import CompressedBatch, ResidualCodec, compress, maxsim

# Formats by the names of their cells.
FORMATS = {
    "float32": "float32",
    "bfloat16": "bfloat16",
    "int8": "int8, scales of documents",
    "int8-token": "int8, scales of tokens",
    "fp8": "fp8",
    "residual-4": "residual codes, 4 bits",
    "residual-2": "residual codes, 2 bits",
    "residual-1": "residual codes, 1 bit",
}
KS = (10, 100)
PER_RESULT = 4  # candidates that are rescored for each result
SAMPLE = 1 << 16  # tokens that a codec is trained on
CENTROIDS = 4096


class Collection:
    """Queries and documents of Cranfield as vectors, and how rankings of positions are judged."""

    def __init__(self, task: Task) -> None:
        self.queries, self.documents = task.encoded(task.queries, True), task.encoded(task.documents, False)
        self.metrics = task.metrics

    @cached_property
    def exact(self) -> Tensor:
        return maxsim(self.queries, self.documents)

    def measure(self, format: str) -> dict:
        """What a format keeps."""
        queries, documents = self.queries, self.documents
        if format == "bfloat16":
            queries, documents = (batch.with_values(batch.values.bfloat16()) for batch in (queries, documents))
        elif format != "float32":
            documents = self.compressed(format)
        scores = self.exact if format == "float32" else maxsim(queries, documents)
        stored = documents.tokens.tensors if isinstance(documents, CompressedBatch) else (documents.values,)
        cell = {
            "bytes_per_token": sum(tensor.nbytes for tensor in stored) / len(self.documents.values),
            **self.quality(lambda k: best(scores, k)),
            "rescored": self.quality(lambda k: self.rescored(scores, k)),
        }
        if isinstance(documents, CompressedBatch) and documents.format == "residual":
            cell |= {"centroids": len(documents.tokens.codec.centroids), "codec_bytes": documents.tokens.codec.nbytes}
        return cell

    def quality(self, ranked: Callable[[int], tuple[Tensor, Tensor]]) -> dict:
        kept = {f"top{k}": round(share(ranked(k)[1], best(self.exact, k)[1]), 4) for k in KS}
        return kept | {"ndcg@10": round(self.metrics(*ranked(DEPTH))["ndcg@10"], 4)}

    def rescored(self, scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Scores and positions of the best ``k`` by exact scores of the candidates."""
        candidates = best(scores, PER_RESULT * k)[1].sort(dim=1).values
        exact, order = best(self.exact.gather(1, candidates), k)
        return exact, candidates.gather(1, order)

    def compressed(self, format: str) -> CompressedBatch:
        name, _, option = format.partition("-")
        if name != "residual":
            return compress(self.documents, name, per_token=option == "token")
        tokens = self.documents.values
        chosen = torch.randperm(len(tokens), generator=torch.Generator().manual_seed(0))[:SAMPLE]
        return compress(self.documents, ResidualCodec.train(tokens[chosen], int(option), CENTROIDS))


def best(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The ``k`` largest of each row, the first of equal ones first."""
    order = scores.argsort(dim=1, descending=True, stable=True)[:, :k]
    return scores.gather(1, order), order


def share(found: Tensor, wanted: Tensor) -> float:
    return (found[:, :, None] == wanted[:, None, :]).any(dim=1).double().mean().item()


def cells(_: argparse.Namespace) -> dict[str, dict]:
    return {f"cranfield/{format}": {} for format in FORMATS}


def run(_: str, cells: dict[str, dict], options: argparse.Namespace) -> Iterator[tuple[str, dict]]:
    collection = Collection(Task(options)) if cells else None
    yield from ((name, collection.measure(name.partition("/")[2])) for name in cells)


def markdown(content: dict) -> str:
    """Bytes of a token, share of the best 10 and 100 that are kept, and nDCG@10; also rescored."""
    header, rows = ["Cranfield", "bytes a token"], []
    for how in ("", ", rescored"):
        header += [*(f"best {k} kept{how}" for k in KS), f"nDCG@10{how}"]
    for name, cell in content["cells"].items():
        entries = [FORMATS[name.partition("/")[2]], f"{cell['bytes_per_token']:.0f}"]
        for part in (cell, cell["rescored"]):
            entries += [*(f"{part[f'top{k}']:.1%}" for k in KS), f"{part['ndcg@10']:.4f}"]
        rows.append(entries)
    return table(header, rows)
