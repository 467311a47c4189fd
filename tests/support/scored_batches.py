"""Batches of the sizes of a BatchShape, scored in every way that the shape names.

As a script, on a GPU: prints what Triton compiles for batches of ``ON_GPU``.
"""

import random
from dataclasses import replace

import torch

from pylate_fastmaxsim import BatchShape, LogSumExp, Max, Softmax, TopK, maxsim
from tests.support.operators import OPERATORS, Problem, pooled, problem, xtr

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


def saving(p: Problem) -> torch.Tensor:
    return maxsim(p.queries, p.documents, p.candidates, zero_floor=p.zero_floor, save_documents="int8")


def score(shape: BatchShape, draw: random.Random, device: str) -> None:
    ways = [("maxsim", OPERATORS["maxsim"] if each == Max() else pooled(each), {}) for each in shape.poolings]
    ways += [("maxsim", OPERATORS["maxsim"]._replace(call=saving), {})] if shape.save_documents else []
    ways += [("maxsim", xtr(shape.xtr, normalizer), {}) for normalizer in ("positive", "retrieved") if shape.xtr]
    for form in shape.formats:
        form = form.replace("-per-", " by ").replace("-", " ")
        ways.append((form.split()[0], OPERATORS[form.split()[0]], {"format": form}))
    if shape.hidden is not None:
        ways.append(("project", OPERATORS["project"], {"hidden": shape.hidden, "bias": draw.random() < 0.5}))
    if shape.splade:
        bias = draw.choice([None, torch.float32, shape.dtype])
        rows = {"rows": draw.choice([1, 16, 301]), "bias": bias is not None, "bias_dtype": bias}
        ways.append(("splade", OPERATORS[draw.choice(["splade", "splade, two logs"])], rows))
    layout = {} if shape.candidates is None else {"layout": "shared", "slots": shape.candidates}
    for name, operator, options in ways:
        sizes = {"queries": (shape.queries, shape.query_tokens), "documents": (shape.documents, shape.document_tokens)}
        # Packed texts, or padded ones.
        packed = draw.random() < 0.6
        given = {
            side: tuple(draw.randint(1 if packed else most, most) for _ in range(count))
            for side, (count, most) in sizes.items()
        }
        given |= {"dim": shape.dim, "dtype": shape.dtype, "floor": shape.zero_floor, "gapless": True, "device": device}
        case = problem(name, draw.getrandbits(30), **given | layout | options)
        # With and without tokens that do not count, and rows of no text; residual codes with and without scales, as PLAID's.
        for side, (_, longest) in sizes.items():
            if (batch := getattr(case, side)) is not None:
                changes = {"keep": draw.choice([None, batch.keep]), "gapless": draw.random() < 0.5}
                case = replace(case, **{side: replace(batch, max_length=longest, **changes)})
        if name == "residual" and draw.random() < 0.5:
            tokens = replace(case.documents.tokens, scales=None)
            case = replace(case, documents=replace(case.documents, tokens=tokens))
        learned = shape.gradients and draw.random() < 0.8
        for values in case.leaves.values():
            values.requires_grad_(learned and (name in ("project", "splade") or draw.random() < 0.6))
        scores = operator.call(case)
        if scores.requires_grad:
            scores.backward(torch.randn_like(scores))


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
            score(shape, draw, "cuda")
    torch.cuda.synchronize()
    print(f"compiled: {sorted(compiled)}")


if __name__ == "__main__":
    main()
