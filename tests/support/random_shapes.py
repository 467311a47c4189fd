"""Hold MaxSim's kernels, or the blocked PyTorch path, to the float64 definition over thousands of random shapes.

    python -m tests.support.random_shapes                        10,000 shapes
    python -m tests.support.random_shapes --start 17 --count 1   repeats shape 17
    python -m tests.support.random_shapes --budget 300           stops after five minutes and says where to go on

The kernels run on a CUDA GPU. They are compiled anew for every d, dtype, presence of masks and class of query length, so
a shape takes these from one of --families families, drawn with the seed. Lengths, numbers of documents and candidates,
and masks vary freely. Rows that do not count hold NaN, so that reading one shows. In one shape of 25 a token holds NaN or
infinity, and the scores must be NaN or infinite exactly where the definition says.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from dataclasses import replace
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from pylate_fastmaxsim import TokenBatch
from pylate_fastmaxsim._operands import ScoringOperands
from pylate_fastmaxsim.cpu import maxsim as blocked
from tests.support.exactness import TOLERANCE, check, exact_scores
from tests.support.ragged_batches import ragged

DIMS = (1, 7, 16, 32, 48, 64, 96, 128, 200, 300, 768, 1024)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
QUERY_LENGTHS = (1, 5, 32, 33, 128, 300)
DOCUMENT_LENGTHS = (1, 8, 63, 64, 65, 129, 255, 256, 700, 2000)
PLANT_EVERY = 25
# A few elements round worse than the root mean square of many, for which the tolerance of the tests is meant.
SLACK = 2.5


class Shape(NamedTuple):
    """One call of the operator; ``planted`` is the value that was put into one token, if any."""

    queries: TokenBatch
    documents: TokenBatch
    candidates: Tensor | None
    zero_floor: Tensor | None
    planted: float | None

    def __str__(self) -> str:
        queries, documents = self.queries, self.documents
        return (
            f"{queries.values.dtype}, d={queries.dim}, queries {queries.lengths.tolist()} (masked: "
            f"{queries.keep is not None}), {len(documents)} documents of at most {documents.max_length} (masked: "
            f"{documents.keep is not None}), candidates: {self.candidates is not None}, planted: {self.planted}"
        )


def shape(number: int, seed: int, families: int, device: str, products: int = 2**24) -> Shape:
    """Shape ``number`` of a seed, of at most about ``products`` multiply-adds."""
    family = random.Random(f"{seed} {number % families}")
    dim, dtype, query_length = family.choice(DIMS), family.choice(DTYPES), family.choice(QUERY_LENGTHS)
    masked, with_candidates, floored = [family.random() < 0.4 for _ in range(2)], *(family.random() < 0.4 for _ in "cz")
    draw = random.Random(f"{seed} {number}")
    generator = torch.Generator().manual_seed(draw.getrandbits(40))

    def lengths(count: int, longest: int) -> list[int]:
        return [draw.choice((0, 1, longest, draw.randint(0, longest))) for _ in range(count)]

    longest = draw.choice([n for n in DOCUMENT_LENGTHS if n * dim * query_length <= products])
    budget = products // (dim * query_length * longest)
    num_queries = min(draw.choice((0, 1, 2, 5, 16)), budget)
    num_documents = min(draw.choice((0, 1, 2, 9, 40, 150)), budget // max(1, num_queries))
    batches = [
        ragged(generator, lengths(count, most), dim, dtype, integers=False, masked=mask)
        for count, most, mask in zip((num_queries, num_documents), (query_length, longest), masked, strict=True)
    ]
    planted = None
    if draw.randrange(PLANT_EVERY) == 0:
        planted = plant(draw, draw.choice(batches))
    candidates = zero_floor = None
    if with_candidates and num_documents:
        candidates = torch.randint(num_documents, (num_queries, draw.choice((0, 1, 3, 20))), generator=generator)
    if floored:
        zero_floor = torch.rand(num_documents, generator=generator) < 0.5
    moved = [None if each is None else each.to(device) for each in (candidates, zero_floor)]
    return Shape(*(on_device(batch, device) for batch in batches), *moved, planted)


def plant(draw: random.Random, batch: TokenBatch) -> float | None:
    """Put NaN or infinity into one token that counts."""
    live = (~batch.values.isnan().any(dim=1)).nonzero().flatten().tolist()
    if not live:
        return None
    value = draw.choice((float("nan"), float("inf"), -float("inf")))
    batch.values[draw.choice(live), draw.randrange(batch.dim)] = value
    return value


def on_device(batch: TokenBatch, device: str) -> TokenBatch:
    names = ("values", "starts", "lengths", "keep")
    tensors = {name: getattr(batch, name) for name in names}
    return replace(batch, **{name: None if tensor is None else tensor.to(device) for name, tensor in tensors.items()})


def check_shape(path: ModuleType, case: Shape) -> None:
    """AssertionError, or what the path itself raises, where the operator leaves the definition."""
    problem = case[:4]
    tolerance = SLACK * TOLERANCE[case.queries.values.dtype, "highest"]
    if case.planted is None:
        check(path, *problem, tolerance=tolerance)
        return
    exact = exact_scores(*problem)
    # Kernels multiply float32 in parts, of which those of infinity give NaN: allowed in the scores that use it.
    in_parts = path is not blocked and case.queries.values.dtype == torch.float32
    with_nan = [batch.with_values(batch.values.masked_fill(batch.values.isinf(), torch.nan)) for batch in case[:2]]
    users = exact_scores(*with_nan, *case[2:4]).isnan()
    for want_winners in (True, False):
        scores = path.forward(ScoringOperands.of(*problem), want_winners, "highest")[0].double()
        if in_parts:
            scores = torch.where(scores.isnan() & users, exact, scores)
        assert torch.equal(scores.isnan(), exact.isnan()), "NaN elsewhere than in the scores that use it"
        finite = exact.isfinite()
        assert torch.equal(scores[exact.isinf()], exact[exact.isinf()]), "infinite scores"
        torch.testing.assert_close(scores[finite], exact[finite], rtol=tolerance, atol=tolerance * case.queries.dim)


def main(arguments: list[str] | None = None, path: ModuleType = blocked, device: str = "cpu") -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=10_000, help="how many shapes")
    parser.add_argument("--start", type=int, default=0, help="number of the first shape")
    parser.add_argument("--families", type=int, default=64, help="how many variants of the kernels to compile")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds after which to stop")
    options = parser.parse_args(arguments)
    begun, failed = time.monotonic(), []
    number, end = options.start, options.start + options.count
    while number < end and time.monotonic() - begun < options.budget:
        case = shape(number, options.seed, options.families, device)
        try:
            check_shape(path, case)
        except Exception as error:  # whatever a kernel raises is a failure of this shape
            failed.append(number)
            print(
                f"FAILED {number}: {type(error).__name__}: {str(error).strip().splitlines()[:1]}\n  {case}", flush=True
            )
        number += 1
    print(f"{number - options.start} shapes, failed: {failed}; next: --seed {options.seed} --start {number}")
    return 1 if failed else 0


if __name__ == "__main__":
    if not torch.cuda.is_available():
        sys.exit(main())
    from tests.support import maxsim_kernels

    sys.exit(main(path=maxsim_kernels, device="cuda"))
