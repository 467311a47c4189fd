"""What compressed documents keep of the exact ranking: on random vectors with planted neighbours, and on Cranfield.

    python -m benchmarks compressed_fidelity --data FOLDER    # measure what is missing, then print the tables

Random vectors are unit vectors. The first tokens of each query stand, more and more disturbed, in 100 documents. Cranfield
is encoded by all-MiniLM-L6-v2, whose outputs are the token vectors of the suite static_cranfield. Codecs are
trained on tokens of the documents.

Shares are of the 10 and the 100 documents that float32 ranks first, on average over the queries, and nDCG@10 is of the
judged queries. Rescored: of the best 4 k by compressed scores the best k by those of float32; of nDCG@10 k is 100.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.harness.tables import table
from benchmarks.quality.static_cranfield import DEPTH, Task
from pylate_fastmaxsim import CompressedBatch, ResidualCodec, TokenBatch, compress, maxsim

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
DATA = {"random": "random vectors", "cranfield": "Cranfield"}
KS = (10, 100)
PLANTED = 100  # documents of each query
PLANTED_TOKENS = 16
NOISE = (0.04, 0.14)  # of each number, from the first of them to the last
PER_RESULT = 4  # candidates that are rescored for each result
SAMPLE = 1 << 16  # tokens that a codec is trained on


@dataclass
class Collection:
    """Queries, documents and how rankings of positions are judged, if they are."""

    queries: TokenBatch
    documents: TokenBatch
    metrics: Callable[[Tensor, Tensor], dict[str, float]] | None = None
    centroids: int | None = None

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
        if self.metrics is not None:
            kept["ndcg@10"] = round(self.metrics(*ranked(DEPTH))["ndcg@10"], 4)
        return kept

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
        sample = tokens[chosen.to(tokens.device)]
        return compress(self.documents, ResidualCodec.train(sample, int(option), self.centroids))


def best(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The ``k`` largest of each row, the first of equal ones first."""
    order = scores.argsort(dim=1, descending=True, stable=True)[:, :k]
    return scores.gather(1, order), order


def share(found: Tensor, wanted: Tensor) -> float:
    return (found[:, :, None] == wanted[:, None, :]).any(dim=1).double().mean().item()


def random_vectors(options: argparse.Namespace) -> Collection:
    generator = torch.Generator().manual_seed(1)

    def drawn(*shape: int) -> Tensor:
        return F.normalize(torch.randn(*shape, options.dim, generator=generator), dim=-1)

    queries = drawn(options.queries, options.query_length)
    documents = drawn(options.documents, options.document_length)
    planted = min(PLANTED, options.documents)
    tokens = min(PLANTED_TOKENS, options.query_length, options.document_length)
    noise = torch.linspace(*NOISE, planted)[:, None, None]
    for query in queries:
        places = torch.randint(0, options.documents, (planted,), generator=generator)
        disturbed = noise * torch.randn(planted, tokens, options.dim, generator=generator)
        documents[places, :tokens] = F.normalize(query[:tokens] + disturbed, dim=-1)
    batches = (TokenBatch.from_padded(values.to(options.device)) for values in (queries, documents))
    return Collection(*batches, centroids=options.centroids)


def cranfield(options: argparse.Namespace) -> Collection:
    from pylate_fastmaxsim.recipes.models.retriever import retriever_of

    task = Task(options.data)
    encoder = retriever_of(task.encoder)
    batches = []
    for texts, is_query in ((task.queries, True), (task.documents, False)):
        made = encoder.encode(texts, 32, is_query=is_query)
        batches.append(
            TokenBatch.from_list([each.to(options.device) for each in made.values.split(made.lengths.tolist())])
        )
    return Collection(*batches, metrics=task.metrics, centroids=options.centroids)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--data", type=Path, help="folder of the collection, in BEIR's layout; without it only random vectors"
    )
    parser.add_argument("--device", default="cpu", help="where to score")
    parser.add_argument("--queries", type=int, default=64, help="of random vectors, as the next four")
    parser.add_argument("--query-length", type=int, default=32)
    parser.add_argument("--documents", type=int, default=20_000)
    parser.add_argument("--document-length", type=int, default=64)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--centroids", type=int, default=4096, help="of a codec")


def cells(options: argparse.Namespace) -> dict[str, dict]:
    return {f"{name}/{format}": {} for name in DATA if name == "random" or options.data for format in FORMATS}


def run(_: str, cells: dict[str, dict], options: argparse.Namespace) -> Iterator[tuple[str, dict]]:
    for name, maker in {"random": random_vectors, "cranfield": cranfield}.items():
        formats = [cell.partition("/")[2] for cell in cells if cell.startswith(f"{name}/")]
        collection = maker(options) if formats else None
        yield from ((f"{name}/{format}", collection.measure(format)) for format in formats)


def markdown(content: dict) -> str:
    """For each set of documents: bytes of a token, share of the best 10 and 100 that are kept, nDCG@10; also rescored."""
    return "\n\n".join(part for name in DATA if (part := _of_data(name, content["cells"])))


def _of_data(name: str, cells: dict[str, dict]) -> str:
    known = {title: cells[f"{name}/{format}"] for format, title in FORMATS.items() if f"{name}/{format}" in cells}
    if not known:
        return ""
    judged = all("ndcg@10" in cell for cell in known.values())
    header = [DATA[name], "bytes a token"]
    for how in ("", ", rescored"):
        header += [f"best {k} kept{how}" for k in KS] + [f"nDCG@10{how}"] * judged
    rows = []
    for title, cell in known.items():
        entries = []
        for part in (cell, cell["rescored"]):
            entries += [f"{part[f'top{k}']:.1%}" for k in KS]
            entries += [f"{part['ndcg@10']:.4f}"] if judged else []
        rows.append([title, f"{cell['bytes_per_token']:.0f}", *entries])
    return table(header, rows)
