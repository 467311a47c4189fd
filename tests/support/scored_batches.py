"""Batches of the sizes of a BatchShape, as users have them, scored in every way that the shape names.

As a script, on a GPU: prints what Triton compiles for batches of ``ON_GPU``.
"""

import random
from dataclasses import replace

import torch

from pylate_fastmaxsim import (
    BatchShape,
    LogSumExp,
    Max,
    ResidualCodec,
    Softmax,
    TokenBatch,
    TopK,
    compress,
    maxsim,
    pooled_scores,
    splade_pool,
    xtr_scores,
)
from pylate_fastmaxsim.ops.projection import project_normalize

POOLINGS = (Max(), TopK(3), TopK(9), Softmax(1.0), LogSumExp(0.5))
FORMATS = ("int8", "int8-per-token", "fp8", "residual-2", "residual-4")
SHAPES = [
    BatchShape(16, 32, 20, 40, dim=32, poolings=POOLINGS, xtr=4, hidden=48, formats=FORMATS),
    BatchShape(3, 7, 5, 300, dim=128, poolings=POOLINGS, xtr=70, formats=FORMATS),
    BatchShape(1, 32, 9, 12, dim=96, dtype=torch.float16, gradients=False, formats=("residual-1", "fp8")),
    BatchShape(
        6, 8, 30, 50, dim=64, candidates=5, poolings=POOLINGS, zero_floor=True, formats=FORMATS, save_documents="int8"
    ),
    BatchShape(130, 2, 140, 3, dim=16, candidates=140, xtr=4, save_documents="int8"),
    BatchShape(4, 300, 4, 20, dim=256, dtype=torch.float32, poolings=(Max(), Softmax(0.1)), formats=FORMATS),
    BatchShape(1, 1, 5, 30, dim=48, poolings=(), splade=True),
    BatchShape(1, 1, 3, 300, dim=16, dtype=torch.float32, poolings=(), splade=True),
]
# Those with the fewest kernels, and yet all kinds of them.
ON_GPU = [*SHAPES[2:5], *SHAPES[6:]]


def drawn(count: int, longest: int, shape: BatchShape, gradients: bool, draw: random.Random, device) -> TokenBatch:
    """Padded or packed texts, with or without tokens that do not count, or a selection of some."""
    padded = torch.randn(count, longest, shape.dim, device=device).to(shape.dtype)
    lengths = [draw.randint(1, longest) for _ in range(count)]
    kind = draw.choice(["padded", "masked", "packed", "kept", "selected"])
    if kind == "padded":
        batch = TokenBatch.from_padded(padded)
    elif kind == "masked":
        mask = torch.arange(longest, device=device) < torch.tensor(lengths, device=device)[:, None]
        batch = TokenBatch.from_padded(padded, mask)
    else:
        borders = torch.tensor([0, *lengths], device=device).cumsum(0)
        values = padded.flatten(0, 1)[: sum(lengths)]
        keep = torch.rand(len(values), device=device) < 0.8 if kind == "kept" else None
        batch = TokenBatch.from_packed(values, borders, keep, max_length=longest)
        if kind == "selected":
            batch = batch.select(torch.randperm(count, device=device))
    return batch.with_values(batch.values.detach().requires_grad_(gradients))


def score(shape: BatchShape, draw: random.Random, device: torch.device) -> None:
    sides = [shape.gradients and draw.random() < 0.6 for _ in range(2)]
    queries = drawn(shape.queries, shape.query_tokens, shape, sides[0], draw, device)
    documents = drawn(shape.documents, shape.document_tokens, shape, sides[1], draw, device)
    candidates = floor = None
    if shape.candidates is not None:
        candidates = torch.randint(shape.documents, (shape.queries, shape.candidates), device=device)
    if shape.zero_floor:
        floor = torch.rand(shape.documents, device=device) < 0.5
    scores = [
        maxsim(queries, documents, candidates, zero_floor=floor)
        if pooling == Max()
        else pooled_scores(queries, documents, candidates, pooling=pooling)
        for pooling in shape.poolings
    ]
    if shape.save_documents is not None:
        scores.append(maxsim(queries, documents, candidates, zero_floor=floor, save_documents=shape.save_documents))
    if shape.xtr is not None:
        for normalizer in ("positive", "retrieved"):
            scores.append(xtr_scores(queries, documents, shape.xtr, candidates, normalizer=normalizer))
    for form in shape.formats:
        chosen, options = form, {}
        if form == "int8-per-token":
            chosen, options = "int8", {"per_token": True}
        elif form.startswith("residual"):
            weights = torch.linspace(-0.2, 0.2, 2 ** int(form[-1]), device=device)
            chosen = ResidualCodec(torch.randn(5, shape.dim, device=device).half(), weights.half(), weights[1:] - 0.01)
        compressed = compress(documents.with_values(documents.values.detach()), chosen, **options)
        if form.startswith("residual") and draw.random() < 0.5:  # as PLAID's files
            compressed = replace(compressed, tokens=replace(compressed.tokens, scales=None))
        scores.append(maxsim(queries, compressed, candidates))
    if shape.hidden is not None:
        options = {"dtype": shape.dtype, "device": device, "requires_grad": shape.gradients}
        hidden, weight = (torch.randn(rows, shape.hidden, **options) for rows in (77, shape.dim))
        scores.append(project_normalize(hidden, weight))
    if shape.splade:
        options = {"device": device, "requires_grad": sides[0]}
        weight = torch.randn(draw.choice([1, 16, 301]), shape.dim, dtype=shape.dtype, **options)
        bias_dtype = draw.choice([None, torch.float32, shape.dtype])
        bias = None if bias_dtype is None else torch.randn(len(weight), dtype=bias_dtype, **options)
        activation_function = draw.choice(["relu", "log1p_relu"])
        scores.append(splade_pool(documents, weight, bias, activation_function=activation_function))
    for each in scores:
        if each.requires_grad:
            each.backward(torch.randn_like(each))


def main() -> None:
    import triton

    compiled = []

    def listen(*, src, cache_hit: bool, **_) -> None:
        if not cache_hit:
            compiled.append(src.name)

    triton.knobs.compilation.listener = listen
    draw = random.Random(0)
    for shape in ON_GPU:
        for _ in range(12):
            score(shape, draw, torch.device("cuda"))
    torch.cuda.synchronize()
    print(f"compiled: {sorted(compiled)}")


if __name__ == "__main__":
    main()
