"""The shapes of the operator benchmark, and the least work that each needs."""

from __future__ import annotations

import random
from dataclasses import dataclass

from benchmarks.harness.lengths import log_normal

ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True)
class Sizes:
    """Queries against documents, each of so many tokens."""

    queries: int
    query_length: int
    documents: int
    document_length: int

    @property
    def name(self) -> str:
        return f"{self.queries}x{self.query_length}.{self.documents}x{self.document_length}"


@dataclass(frozen=True)
class Shape:
    """Nq queries of Lq tokens against documents of Ld tokens, all d-dimensional.

    ``documents`` counts those that one query scores: all Nd of them, or with ``layout="candidates"`` the K that
    each query has for itself. ``layout="ragged"`` draws lengths with a mean of ``document_length / 4``.
    """

    name: str
    group: str
    queries: int
    query_length: int
    documents: int
    document_length: int
    dim: int = 128
    dtype: str = "bfloat16"
    precision: str = "highest"
    layout: str = "in-batch"
    backward: bool = True
    competitors: tuple[str, ...] = ("fast", "lik", "flash", "einsum", "compile")

    @property
    def title(self) -> str:
        if self.layout == "candidates":
            documents = f"{self.queries} x {self.documents} x {self.document_length}"
        else:
            documents = f"{self.documents} x {self.document_length}"
        details = [f"d = {self.dim}"] * (self.dim != 128) + [self.dtype] * (self.dtype != "bfloat16")
        details += [f'"{self.precision}"'] * (self.dtype == "float32")
        return ", ".join([f"{self.group}: {self.queries} x {self.query_length} against {documents}", *details])

    def lengths(self) -> list[int]:
        """Live tokens of every document that exists, the same on every call."""
        if self.layout == "candidates":
            return [self.document_length] * (self.queries * self.documents)
        if self.layout != "ragged":
            return [self.document_length] * self.documents
        draw = random.Random(0)
        drawn = (log_normal(self.document_length / 4, draw) for _ in range(self.documents))
        return [min(max(length, 1), self.document_length) for length in drawn]

    def flops(self) -> int:
        """Operations of the matrix product over live tokens, which every exact MaxSim computes."""
        queries = 1 if self.layout == "candidates" else self.queries
        return 2 * queries * self.query_length * sum(self.lengths()) * self.dim

    def winner_bytes(self) -> int:
        """One position for every query token and document."""
        size = 1 if self.document_length <= 255 else 2 if self.document_length <= 32767 else 4
        return size * self.queries * self.query_length * self.documents

    def input_bytes(self) -> int:
        return (self.queries * self.query_length + sum(self.lengths())) * self.dim * ELEMENT_BYTES[self.dtype]

    def bytes(self, measure: str) -> int:
        """The fewest bytes to and from device memory: inputs read once, outputs written once.

        The backward reads winners and the gradient of the scores, and writes gradients of the size of the inputs. The
        winning tokens that it reads may be in the cache.
        """
        scores = 4 * self.queries * self.documents
        least = {"forward": self.input_bytes() + scores}
        least["forward_winners"] = least["forward"] + self.winner_bytes()
        least["forward_backward"] = 2 * least["forward_winners"]
        return least[measure]


OURS = ("fast",)
SWEPT = [2**power for power in range(3, 12)]
AGAINST_EINSUM = ("fast", "einsum", "compile")
SHAPES = [
    Shape("tiny", "tiny", 3, 4, 5, 8, dim=16, dtype="float32", competitors=AGAINST_EINSUM),
    Shape("tiny-candidates", "tiny", 3, 4, 2, 8, dim=16, layout="candidates", competitors=AGAINST_EINSUM),
    Shape("tiny-ragged", "tiny", 3, 4, 5, 32, dim=16, layout="ragged", competitors=AGAINST_EINSUM),
    Shape("in-batch-1", "in-batch", 128, 32, 128, 180),
    Shape("in-batch-2", "in-batch", 256, 32, 512, 300),
    Shape("in-batch-3", "in-batch", 512, 32, 1024, 180),
    Shape("colpali-128", "ColPali", 64, 128, 64, 1024),
    Shape("colpali-1024", "ColPali", 64, 1024, 64, 1024),
    Shape("kd", "KD", 64, 32, 32, 300, layout="candidates"),
    Shape("rerank-1000", "rerank", 1, 32, 1000, 300, backward=False),
    Shape("rerank-10000", "rerank", 1, 32, 10_000, 300, backward=False),
    *(Shape(f"rerank-long-{n}", "rerank", 1, 1024, n, 1024, backward=False) for n in (1000, 20_000)),
    Shape("ragged", "ragged", 256, 32, 512, 300, layout="ragged"),
    Shape("ragged-1024", "ragged", 256, 32, 256, 1024, layout="ragged"),
    Shape("ragged-4096", "ragged", 256, 32, 128, 4096, layout="ragged"),
    Shape("fp16", "fp16", 256, 32, 512, 300, dtype="float16"),
    *(
        Shape(f"fp32-{p}", "fp32", 128, 32, 256, 180, dtype="float32", precision=p, competitors=AGAINST_EINSUM)
        for p in ("highest", "high")
    ),
    *(Shape(f"dim-{d}", "dimensions", 256, 32, 512, 180, dim=d) for d in (48, 64, 96, 128, 256)),
    *(Shape(f"dim-{d}", "dimensions", 128, 32, 256, 180, dim=d) for d in (384, 768, 1024, 4096)),
    *(Shape(f"sweep-Nq-{n}", "sweep", n, 32, 512, 180, competitors=OURS) for n in SWEPT[:-1]),
    *(Shape(f"sweep-Nd-{n}", "sweep", 256, 32, n, 180, competitors=OURS) for n in SWEPT[:-1]),
    *(Shape(f"sweep-Ld-{n}", "sweep", 128, 32, 256, n, competitors=OURS) for n in SWEPT[1:]),
]
BY_NAME = {shape.name: shape for shape in SHAPES}
GROUPS = list(dict.fromkeys(shape.group for shape in SHAPES))
