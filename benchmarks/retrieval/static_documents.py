"""Documents as sparse vectors of static late interaction on one GPU: time, peak memory and size of the matrix.

    python -m benchmarks static_documents
    python -m benchmarks static_documents --documents 300 --vocabulary 500 --results /tmp/a.json   # on a CPU

Documents have 60 tokens by the law of sparse_data.py, of BERT's 30,522. Vectors have 256 dimensions. They are random, with
planted neighbours: families of 56 tokens with a cosine of about 0.42, and in each 7 groups of 8 tokens with about 0.6. So
a token has about 10 neighbours above 0.5, itself included, and 40 above 0.4. Of the vectors that
sentence-transformers/all-MiniLM-L6-v2 gives to BERT's tokens, each of them alone in a text, the median token has 8 and 45.

A cell is a threshold. It has the time for the table of neighbours, which is made once, and for the documents from their
token ids, which are on the CPU, to the matrix on the device. The first documents are also made by MaxSim of the whole
vocabulary, which must give the same entries.
"""

from __future__ import annotations

import argparse
import math

import torch
from torch import Tensor
from torch.nn.functional import normalize

from benchmarks.harness.timing import seconds_of
from benchmarks.retrieval.sparse_data import VOCABULARY, term_law
from pylate_fastmaxsim import SparseBatch, StaticLateInteraction
from pylate_fastmaxsim.retrieval.static.documents import from_maxsim
from pylate_fastmaxsim.retrieval.static.tokens import TokenIds

TIMEOUT = 300
THRESHOLDS = (0.5, 0.4)
TOKENS = 60  # of a document
DIM = 256
GROUP, FAMILY = 8, 56  # tokens
OF_FAMILY, OF_GROUP = 0.42, 0.18  # of the squared length of a vector: what it shares with its family, and its group
BATCH = 16384  # documents
COMPARED = 1 / 256  # share of documents that are made both ways


def token_vectors(vocabulary: int, device: torch.device) -> Tensor:
    """``[vocabulary, DIM]``, float32."""
    generator = torch.Generator(device).manual_seed(0)
    # Tokens of a family are not neighbours in the order of frequencies.
    places = torch.randperm(vocabulary, generator=generator, device=device)

    def drawn(size: int) -> Tensor:
        vectors = torch.randn(-(-vocabulary // size), DIM, generator=generator, device=device)
        return normalize(vectors, dim=1)[places // size]

    own = 1 - OF_FAMILY - OF_GROUP
    return OF_FAMILY**0.5 * drawn(FAMILY) + OF_GROUP**0.5 * drawn(GROUP) + own**0.5 * drawn(1)


def token_ids(documents: int, vocabulary: int) -> TokenIds:
    """On the CPU, where a tokenizer's are."""
    law = term_law()[:vocabulary].float()
    generator = torch.Generator().manual_seed(0)
    ids = [
        torch.multinomial(law, len(part) * TOKENS, replacement=True, generator=generator).int()
        for part in torch.arange(documents).split(BATCH)
    ]
    return TokenIds(torch.cat(ids), torch.arange(documents + 1) * TOKENS)


def documents(model: StaticLateInteraction, tokens: TokenIds) -> list[SparseBatch]:
    starts = range(0, len(tokens), BATCH)
    return [model.documents(tokens.part(start, min(start + BATCH, len(tokens)))) for start in starts]


def by_maxsim(model: StaticLateInteraction, tokens: TokenIds) -> SparseBatch:
    return from_maxsim(tokens, model.query_vectors, model.document_vectors, model.thresholds)


def difference(ours: SparseBatch, other: SparseBatch) -> float | None:
    """The largest difference of weights; None if terms differ."""
    if not torch.equal(ours.offsets, other.offsets) or not torch.equal(ours.terms.int(), other.terms.int()):
        return None
    return max((ours.weights - other.weights).abs().tolist(), default=0.0)


def measure(cell: dict) -> dict:
    device, threshold = torch.device("cuda" if torch.cuda.is_available() else "cpu"), cell["threshold"]
    vectors, tokens = token_vectors(cell["vocabulary"], device), token_ids(cell["documents_made"], cell["vocabulary"])
    few, some = (tokens.part(0, math.ceil(share * len(tokens))) for share in (COMPARED / 64, COMPARED))
    model = StaticLateInteraction(vectors, threshold=threshold)
    table_cost, neighbours = seconds_of(lambda: model.neighbour_table, device)
    documents(model, few), by_maxsim(model, few)  # warms up
    cost, batches = seconds_of(lambda: documents(model, tokens), device)
    entries, nbytes = sum(len(batch.terms) for batch in batches), sum(batch.nbytes for batch in batches)
    del batches
    maxsim_cost, dense = seconds_of(lambda: by_maxsim(model, some), device)
    return {
        "table": {**table_cost, "neighbours_per_token": len(neighbours.terms) / len(vectors)},
        "documents": {
            **cost,
            "documents": len(tokens),
            "entries_per_document": entries / len(tokens),
            "nbytes": nbytes,
        },
        "maxsim": {**maxsim_cost, "documents": len(some), "difference": difference(model.documents(some), dense)},
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--documents", type=int, default=1_000_000)
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY, help=f"at most {VOCABULARY:,}")


def cells(options: argparse.Namespace) -> dict[str, dict]:
    sizes = {"documents_made": options.documents, "vocabulary": options.vocabulary}
    return {str(threshold): {"threshold": threshold, **sizes} for threshold in THRESHOLDS}
