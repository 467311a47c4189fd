"""Compressed documents in the form of each competitor: inputs, ways to score, measures.

Every competitor is called through its public functions. Documents are stored in its form beforehand; the queries of this
package are rounded inside of the timed calls, those of the peers before them.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize, pad

from benchmarks.harness.timing import DEVICE
from benchmarks.harness.workers import or_failure
from benchmarks.operators.measure import gradient_calls, sets_beyond_cache, spread, timed
from benchmarks.operators.shapes import Sizes
from pylate_fastmaxsim import CompressedBatch, ResidualCodec, TokenBatch, compress, maxsim, reference

AUTOTUNED_CONFIGS = 3  # of each kernel of the peers
_PREFERRED = [(64, 64, 4), (32, 64, 4), (64, 128, 8), (128, 128, 8), (32, 128, 8), (128, 64, 8)]  # Q, D, warps
_LEAST_BYTES = 36  # of a token of 2 bits a number
_SIMILARITY_BYTES = 2**31  # of einsum at once


@dataclass(frozen=True)
class Shape(Sizes):
    dim: int = 128
    centroids: int = 4096


SHAPES = [
    Shape(256, 32, 512, 300),
    Shape(1, 32, 10_000, 300),
    Shape(64, 128, 64, 1024),
    Shape(1, 1024, 1000, 1024),
    Shape(1, 1024, 20_000, 1024),
]
TINY = [Shape(3, 4, 5, 9, dim=32, centroids=8)]


@dataclass(frozen=True)
class Inputs:
    """One set of bfloat16 vectors, as ragged batches."""

    shape: Shape
    queries: TokenBatch
    documents: TokenBatch

    @property
    def padded_queries(self) -> Tensor:
        return self.queries.values.view(len(self.queries), -1, self.shape.dim)

    def padded(self, rows: Tensor) -> Tensor:
        """What belongs to the tokens of the documents, ``[T, ...]``, as ``[Nd, Ld, ...]``."""
        return rows.view(len(self.documents), -1, *rows.shape[1:])


def unit_vectors(count: int, dim: int, generator: torch.Generator) -> Tensor:
    out = torch.empty(count, dim, dtype=torch.bfloat16, device=DEVICE)
    for part in out.split(2**20):
        part.copy_(normalize(torch.randn(part.shape, device=DEVICE, generator=generator), dim=-1))
    return out


@functools.lru_cache(1)
def input_sets(shape: Shape) -> list[Inputs]:
    """Enough sets of inputs that taking them in turn never finds one in the GPU's cache, in any format."""
    generator = torch.Generator(DEVICE).manual_seed(0)

    def batch(count: int, length: int) -> TokenBatch:
        borders = torch.arange(count + 1, device=DEVICE) * length
        return TokenBatch.from_packed(unit_vectors(count * length, shape.dim, generator), borders, max_length=length)

    count = sets_beyond_cache(shape.documents * shape.document_length * _LEAST_BYTES)
    sizes = ((shape.queries, shape.query_length), (shape.documents, shape.document_length))
    return [Inputs(shape, *(batch(*size) for size in sizes)) for _ in range(count)]


@functools.cache
def codec(bits: int, dim: int, centroids: int) -> ResidualCodec:
    sample = unit_vectors(max(2**16, 16 * centroids), dim, torch.Generator(DEVICE).manual_seed(1))
    return ResidualCodec.train(sample.float(), bits=bits, centroids=centroids, seed=0)


@dataclass(frozen=True)
class Case:
    """One way to score one set of inputs.

    ``definition`` gives what the scores of a few queries and documents, by index, should be, in float64: those of the
    numbers as they are stored. ``queries`` are those that have a gradient, if any has.
    """

    score: Callable[[], Tensor]
    definition: Callable[[Tensor, Tensor], Tensor]
    stored_bytes: int
    queries: Tensor | None = None


def few(batch: TokenBatch, index: Tensor) -> TokenBatch:
    """A few sequences in float64."""
    chosen = batch.select(index)
    return chosen.with_values(chosen.values.double())


def exact(inputs: Inputs, rows: Tensor, columns: Tensor) -> Tensor:
    """Scores of the bfloat16 vectors in float64."""
    return reference.maxsim(few(inputs.queries, rows), few(inputs.documents, columns))


def stored(queries: Tensor, documents: Tensor, rows: Tensor) -> Tensor:
    """Scores in float64 of the ``rows`` of padded queries against padded documents."""
    return reference.maxsim(*(TokenBatch.from_padded(each.double()) for each in (queries[rows], documents)))


# This package.
def compressed(inputs: Inputs, form: str) -> CompressedBatch:
    """The documents in one of this package's formats."""
    shape, documents = inputs.shape, inputs.documents
    if form.startswith("int8"):
        return compress(documents, "int8", per_token=form == "int8 by token")
    if form == "fp8":
        return compress(documents, "fp8")
    return compress(documents, codec(bits_of(form), shape.dim, shape.centroids))


def bits_of(form: str) -> int:
    return int(form.split()[1])


def fast(inputs: Inputs, form: str) -> Case:
    queries = inputs.queries.with_values(inputs.queries.values.detach().requires_grad_())
    documents = inputs.documents if form == "bf16" else compressed(inputs, form)

    def definition(rows: Tensor, columns: Tensor) -> Tensor:
        if form == "bf16":
            return exact(inputs, rows, columns)
        return reference.compressed_maxsim(inputs.queries.select(rows), documents.select(columns))

    nbytes = documents.values.nbytes if form == "bf16" else documents.nbytes
    return Case(lambda: maxsim(queries, documents), definition, nbytes, queries.values)


def naive(inputs: Inputs, form: str) -> Case:
    """Decompress all documents to bfloat16, then einsum over as many of them as fit in 2 GiB of similarities."""
    documents, queries = compressed(inputs, form), inputs.padded_queries
    step = max(1, _SIMILARITY_BYTES // (2 * inputs.queries.values.shape[0] * documents.max_length))

    def score() -> Tensor:
        decompressed = inputs.padded(documents.decompress(torch.bfloat16).values)
        out = []
        for begin in range(0, len(documents), step):
            similarities = torch.einsum("qsd,ntd->qnst", queries, decompressed[begin : begin + step])
            out.append(similarities.amax(-1).sum(-1, dtype=torch.float32))
        return torch.cat(out, 1)

    def definition(rows: Tensor, columns: Tensor) -> Tensor:
        chosen = documents.select(columns).decompress(torch.float64)
        return reference.maxsim(few(inputs.queries, rows), chosen)

    return Case(score, definition, documents.nbytes)


# The peers.
@functools.cache
def limit_autotuning(*modules: str) -> dict[str, list[str]]:
    """Cut the lists of tiles that the kernels of some modules choose from, so that the run ends; returns what is left."""
    kept = {}
    for module in map(importlib.import_module, modules):
        for name, kernel in vars(module).items():
            if type(kernel).__name__ == "Autotuner":
                kernel.configs = sorted(kernel.configs, key=_rank)[:AUTOTUNED_CONFIGS]
                kept[f"{module.__name__}.{name}"] = [str(config) for config in kernel.configs]
    return kept


def _rank(config) -> int:
    tile = (config.kwargs.get("BLOCK_Q"), config.kwargs.get("BLOCK_D"), config.num_warps)
    return _PREFERRED.index(tile) if tile in _PREFERRED else len(_PREFERRED)


def lik_fp8(inputs: Inputs, form: str) -> Case:
    from late_interaction_kernels import fp8

    by_token = form == "fp8 by token"
    quantize = fp8.quantize_fp8_per_token if by_token else fp8.quantize_fp8_per_tensor
    queries, q_scale = quantize(inputs.padded_queries)
    rows, d_scale = quantize(inputs.documents.values)
    documents, d_scale = inputs.padded(rows), inputs.padded(d_scale) if by_token else d_scale

    score = functools.partial(fp8.maxsim_inference_fp8, queries, documents, scale_Q=q_scale, scale_D=d_scale)

    def definition(rows: Tensor, columns: Tensor) -> Tensor:
        scales = (q_scale[..., None], d_scale[columns][..., None]) if by_token else (q_scale, d_scale)
        chosen = documents.view(torch.uint8)[columns].view(documents.dtype)  # float8 cannot be indexed everywhere
        return stored(queries.double() * scales[0], chosen.double() * scales[1], rows)

    return Case(score, definition, documents.nbytes + d_scale.nbytes)


def mirrored_bytes(packed: Tensor) -> Tensor:
    """Residual bytes with their bits reversed.

    There the first number of a byte is in the low bits and each begins with its highest, unlike in PLAID's files.
    """
    mirrored = [int(f"{byte:08b}"[::-1], 2) for byte in range(256)]
    return torch.tensor(mirrored, dtype=torch.uint8, device=packed.device)[packed.int()]


def lik_residual(inputs: Inputs, form: str) -> Case:
    from late_interaction_kernels import plaid

    bits, packed_layout = bits_of(form), form.endswith("packed")
    batch = compressed(inputs, f"residual {bits} bits")
    tokens, lengths = batch.tokens, batch.lengths
    codes, residuals = tokens.codes, mirrored_bytes(tokens.packed)
    centroids, weights = tokens.codec.centroids, tokens.codec.weights.float()
    queries = inputs.padded_queries
    if packed_layout:
        borders = pad(lengths.cumsum(0), (1, 0)).int()
        arguments = (codes, residuals, borders, centroids, weights, bits)
        score = functools.partial(plaid.maxsim_residual_varlen, queries, *arguments, max_seqlen_d=batch.max_length)
    else:
        arguments = (inputs.padded(codes), inputs.padded(residuals), lengths, centroids, weights, bits)
        score = functools.partial(plaid.maxsim_residual, queries, *arguments)

    def definition(rows: Tensor, columns: Tensor) -> Tensor:
        chosen = batch.select(columns).decompress(torch.float64)
        own = few(inputs.queries, rows)
        # It gives all vectors the norm 1, those of the queries too.
        own, chosen = (each.with_values(normalize(each.values, dim=-1)) for each in (own, chosen))
        return reference.maxsim(own, chosen)

    return Case(score, definition, codes.nbytes + residuals.nbytes)


def flash(inputs: Inputs, form: str) -> Case:
    """Its functions take one query at a time."""
    import flash_maxsim as peer

    queries = list(inputs.padded_queries.half())
    padded = inputs.padded(inputs.documents.values).half()
    if form == "int8, affine":
        documents, scales, minima = peer.quantize_int8(padded)
        one = functools.partial(peer.flash_maxsim_int8, D_uint8=documents, scales=scales, mins=minima)
        calls = [functools.partial(one, query) for query in queries]
        of_documents = lambda columns: documents[columns].double() * scales[columns] + minima[columns]  # noqa: E731
        size = documents.nbytes + scales.nbytes + minima.nbytes
    else:
        documents, scales = peer.quantize_int8_symmetric(padded)
        of_documents = lambda columns: documents[columns].double() * scales[columns]  # noqa: E731
        size = documents.nbytes + scales.nbytes
        if form == "int8, 16-bit queries":
            one = functools.partial(peer.flash_maxsim_int8_symmetric, D_int8=documents, scales=scales)
            calls = [functools.partial(one, query) for query in queries]
        else:
            rounded = [peer.quantize_query_int8(query) for query in queries]
            one = functools.partial(peer.flash_maxsim_int8x8, None, documents, scales[..., 0].contiguous())
            calls = [functools.partial(one, Q_int8=values, q_scales=scale) for values, scale in rounded]
            queries = [values.double() * scale.double()[:, None] for values, scale in rounded]
    return Case(
        lambda: torch.stack([call() for call in calls]),
        lambda rows, columns: stored(torch.stack(queries), of_documents(columns), rows),
        size,
    )


def lik(inputs: Inputs, form: str) -> Case:
    return lik_fp8(inputs, form) if form.startswith("fp8") else lik_residual(inputs, form)


CASES = {"fast": fast, "naive": naive, "lik": lik, "flash": flash}
AUTOTUNED = {
    "lik": ("late_interaction_kernels.fp8", "late_interaction_kernels.plaid"),
    "flash": ("flash_maxsim.flash_maxsim_quant",),
}


def forms(competitor: str) -> list[str]:
    """What a competitor scores, in this order."""
    if competitor == "fast":
        return ["bf16", *forms("naive")]
    if competitor == "naive":
        return ["int8 by document", "int8 by token", "fp8", "residual 4 bits", "residual 2 bits"]
    if competitor == "flash":
        return ["int8", "int8, 16-bit queries", "int8, affine"]
    layouts = ("padded", "packed")
    return ["fp8", "fp8 by token", *(f"residual {bits} bits, {layout}" for bits in (4, 2) for layout in layouts)]


def largest_errors(case: Case, inputs: Inputs) -> dict[str, float]:
    """Largest errors of a few scores, relative to the largest of these: by the definition, and of compression too."""
    rows, columns = spread(len(inputs.queries), 4), spread(len(inputs.documents), 8)
    found = case.score().detach()[rows[:, None], columns].double()
    expected = {"definition": case.definition(rows, columns), "uncompressed": exact(inputs, rows, columns)}
    return {name: float((found - each).abs().max() / each.abs().max()) for name, each in expected.items()}


def measure(cell: dict) -> dict:
    """Times, memory and errors; a measure that fails is recorded as a sentence."""
    autotuning = limit_autotuning(*AUTOTUNED.get(cell["competitor"], ()))
    sets = input_sets(Shape(**cell["shape"]))
    cases = [CASES[cell["competitor"]](inputs, cell["form"]) for inputs in sets]
    wrong = or_failure(functools.partial(largest_errors, cases[0], sets[0]))
    measures = {"forward": [torch.no_grad()(case.score) for case in cases]}
    if cases[0].queries is not None:
        measures["query_gradient"] = gradient_calls(
            lambda case: case.score(), cases, lambda case: {"query": case.queries}
        )
    return {"stored_bytes": cases[0].stored_bytes, "errors": wrong, **timed(measures), "autotuning": autotuning}
