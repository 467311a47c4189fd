"""Hold the operator to the float64 definition over thousands of random shapes, on whatever device is there.

    python tests/support/random_shapes.py                        10,000 shapes
    python tests/support/random_shapes.py --start 4200           goes on from shape 4200
    python tests/support/random_shapes.py --start 17 --count 1   repeats shape 17
    python tests/support/random_shapes.py --budget 300           stops after five minutes and says where to go on

The Triton kernels run where there is a CUDA GPU, or with TRITON_INTERPRET=1 in Triton's interpreter, and the blocked
PyTorch path on any other CPU. A shape depends on --seed, its number and --families, and on the path, which bounds how
large it may be.

Kernels are compiled anew for every d, dtype, presence of masks and class of query length, so a shape takes these from
one of --families families, drawn with the seed; d is one of twelve. That is some four kernels for each family. What
compiles nothing varies freely: the lengths, the number of documents and candidates, which tokens are masked, and where
sequences lie. Another seed draws other families.

Rows that do not count hold NaN, so reading one shows. In one shape of 25 a token holds NaN or infinity, and the scores
must be NaN or infinite exactly where the definition says.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
import traceback
from contextlib import nullcontext
from dataclasses import dataclass, replace
from types import ModuleType

import torch
from exactness import TOLERANCE, check, exact_scores
from torch import Tensor

from pylate_fastmaxsim import TokenBatch
from pylate_fastmaxsim._operands import ScoringOperands
from pylate_fastmaxsim.cpu import maxsim as blocked

DIMS = (1, 7, 16, 32, 48, 64, 96, 128, 200, 300, 768, 1024)
RARE_DIMS = DIMS[-2:]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
QUERIES = (1, 2, 5, 16, 40)
QUERY_LENGTHS = (1, 5, 32, 33, 128, 300)
DOCUMENT_LENGTHS = (1, 8, 63, 64, 65, 129, 255, 256, 700, 2000)
LONGEST_WITH_BYTE_WINNERS = 255
PLANT_EVERY = 25


@dataclass(frozen=True)
class Path:
    """Where the operator runs, and how many multiply-adds and values a shape may take there."""

    module: ModuleType
    device: str
    products: int
    values: int
    # A few elements round worse than the root mean square of many, for which the tolerance of the tests is meant.
    slack: float = 2.5


@dataclass(frozen=True)
class Family:
    """What the kernels are compiled for."""

    dim: int
    dtype: torch.dtype
    queries: int
    query_length: int
    long_documents: bool
    queries_masked: bool
    documents_masked: bool
    candidates: bool
    zero_floor: bool


@dataclass
class Shape:
    """One call of the operator; ``planted`` says what was put into one token, if anything."""

    queries: TokenBatch
    documents: TokenBatch
    candidates: Tensor | None
    zero_floor: Tensor | None
    planted: str | None

    def __str__(self) -> str:
        layout = "all" if self.candidates is None else f"{self.candidates.shape[1]} candidates"
        return (
            f"{self.queries.values.dtype}, d={self.queries.dim}, {len(self.queries)} queries of at most "
            f"{self.queries.max_length} (masked: {self.queries.keep is not None}) x {len(self.documents)} documents of "
            f"at most {self.documents.max_length} (masked: {self.documents.keep is not None}), {layout}, "
            f"zero_floor: {self.zero_floor is not None}, planted: {self.planted}"
        )


def families(seed: int, count: int) -> list[Family]:
    """``count`` families in which every d and dtype occurs about equally often, the largest d more rarely."""
    draw = random.Random(seed)
    pairs = [(dim, dtype) for dim in DIMS if dim not in RARE_DIMS for dtype in DTYPES]
    pairs += [(dim, draw.choice(DTYPES)) for dim in RARE_DIMS]
    draw.shuffle(pairs)
    return [
        Family(
            *pairs[number % len(pairs)],
            queries=draw.choice(QUERIES),
            query_length=draw.choice(QUERY_LENGTHS),
            long_documents=draw.random() < 0.3,
            queries_masked=draw.random() < 0.4,
            documents_masked=draw.random() < 0.5,
            candidates=draw.random() < 0.4,
            zero_floor=draw.random() < 0.3,
        )
        for number in range(count)
    ]


def shape(number: int, seed: int, kinds: list[Family], path: Path) -> Shape:
    """Shape ``number`` of a seed."""
    draw = random.Random(f"{seed} {number}")
    generator = torch.Generator().manual_seed(draw.getrandbits(40))
    family = draw.choice(kinds)
    # max_length is only a bound on the lengths, so it can stay that of the family while these vary.
    longest = draw.choice([n for n in DOCUMENT_LENGTHS if (n > LONGEST_WITH_BYTE_WINNERS) == family.long_documents])
    longest = min(longest, max(1, path.values // family.dim))
    shortest_bound = LONGEST_WITH_BYTE_WINNERS + 1 if family.long_documents else longest
    query_length = max(1, min(family.query_length, path.products // max(1, family.dim * longest)))
    queries = max(1, min(family.queries, path.products // (family.dim * longest * query_length)))
    documents = min(
        draw.choice((0, 1, 2, 9, 40, 150, 1000)),
        max(1, path.values // (family.dim * longest)),
        max(1, path.products // (family.dim * longest * query_length * queries)),
    )
    slots = min(draw.choice((0, 1, 3, 20)), max(1, path.values // (family.dim * longest * queries)))

    # No query at all, now and then; a query without a token comes with the lengths.
    queries *= draw.random() < 0.98
    query_batch = ragged(draw, generator, queries, query_length, family.dim, family.dtype, family.queries_masked)
    document_batch = ragged(
        draw, generator, documents, longest, family.dim, family.dtype, family.documents_masked, shortest_bound
    )
    planted = None
    if draw.randrange(PLANT_EVERY) == 0:
        planted = plant(draw, draw.choice((query_batch, document_batch)))
    candidates = zero_floor = None
    if family.candidates and documents:
        candidates = torch.randint(documents, (queries, slots), generator=generator)
    if family.zero_floor:
        zero_floor = torch.rand(documents, generator=generator) < 0.5
    return Shape(
        moved(query_batch, path.device),
        moved(document_batch, path.device),
        None if candidates is None else candidates.to(path.device),
        None if zero_floor is None else zero_floor.to(path.device),
        planted,
    )


def ragged(draw, generator, count, longest, dim, dtype, masked, bound=None) -> TokenBatch:
    """Sequences of 0 to ``longest`` tokens in shuffled order with gaps; every row that does not count is NaN."""
    lengths = [draw.choice((0, 1, longest, draw.randint(0, longest), draw.randint(0, longest))) for _ in range(count)]
    gapless = draw.random() < 0.4
    starts, row = [0] * count, 0 if gapless else draw.randrange(3)
    for place in draw.sample(range(count), count):
        starts[place] = row
        row += lengths[place] + (0 if gapless else draw.choice((0, 0, 1, 3)))
    counts = torch.zeros(row, dtype=torch.bool)
    for start, length in zip(starts, lengths, strict=True):
        counts[start : start + length] = True
    keep = None
    if masked:
        keep = torch.rand(row, generator=generator) < draw.choice((0.05, 0.6, 0.9))
        counts &= keep
    values = torch.randn(row, dim, generator=generator)
    if dim > 1:
        values = torch.nn.functional.normalize(values, dim=-1)
    values[~counts] = torch.nan
    return TokenBatch(
        values.to(dtype),
        torch.tensor(starts, dtype=torch.int64),
        torch.tensor(lengths, dtype=torch.int64),
        max(longest, bound or 0),
        keep,
        gapless,
    )


def plant(draw: random.Random, batch: TokenBatch) -> str | None:
    """Put NaN or infinity into one token that counts."""
    live = (~batch.values.isnan().any(dim=1)).nonzero().flatten().tolist()
    if not live:
        return None
    row, value = draw.choice(live), draw.choice((float("nan"), float("inf"), -float("inf")))
    batch.values[row, draw.randrange(batch.dim)] = value
    return f"{value} in row {row}"


def moved(batch: TokenBatch, device: str) -> TokenBatch:
    keep = None if batch.keep is None else batch.keep.to(device)
    return replace(
        batch,
        values=batch.values.to(device),
        starts=batch.starts.to(device),
        lengths=batch.lengths.to(device),
        keep=keep,
    )


def check_shape(path: Path, case: Shape) -> None:
    """AssertionError, or what the path itself raises, where the operator leaves the definition."""
    problem = (case.queries, case.documents, case.candidates, case.zero_floor)
    tolerance = path.slack * TOLERANCE[case.queries.values.dtype, "highest"]
    if case.planted is None:
        check(path.module, *problem, tolerance=tolerance)
        return
    exact = exact_scores(*problem)
    # The kernels multiply float32 in parts, of which those of infinity give NaN: allowed in the scores that use it.
    in_parts = (
        path.module.__name__.startswith("pylate_fastmaxsim.kernels") and case.queries.values.dtype == torch.float32
    )
    users = users_of_the_planted(case)
    for want_winners in (True, False):
        scores = path.module.forward(ScoringOperands.of(*problem), want_winners, "highest")[0].double()
        if in_parts and "inf" in case.planted:
            scores = torch.where(scores.isnan() & users, exact, scores)
        assert torch.equal(scores.isnan(), exact.isnan()), "NaN elsewhere than in the scores that use it"
        finite = exact.isfinite()
        assert torch.equal(scores[exact.isinf()], exact[exact.isinf()]), "infinite scores"
        torch.testing.assert_close(scores[finite], exact[finite], rtol=tolerance, atol=tolerance)


def users_of_the_planted(case: Shape) -> Tensor:
    """Which scores a token that is not finite takes part in."""
    q_values, d_values = (
        batch.values.masked_fill(batch.values.isinf(), torch.nan) for batch in (case.queries, case.documents)
    )
    with_nan = case.queries.with_values(q_values), case.documents.with_values(d_values)
    return exact_scores(*with_nan, case.candidates, case.zero_floor).isnan()


def available_path() -> Path:
    """The kernels on a GPU or in the interpreter, else the blocked PyTorch path."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        from pylate_fastmaxsim.kernels.maxsim import launch as maxsim_launch

        # The interpreter cuts float32 off to bfloat16, where a GPU rounds.
        return Path(maxsim_launch, "cpu", products=2**16, values=2**12, slack=5)
    if torch.cuda.is_available():
        from pylate_fastmaxsim.kernels.maxsim import launch as maxsim_launch

        return Path(maxsim_launch, "cuda", products=2**33, values=2**23)
    return Path(blocked, "cpu", products=2**24, values=2**19)


def lost_the_device(error: Exception) -> bool:
    """After such an error every further call fails as well."""
    return "CUDA error" in str(error) and not isinstance(error, torch.OutOfMemoryError)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=10_000, help="how many shapes")
    parser.add_argument("--start", type=int, default=0, help="number of the first shape")
    parser.add_argument("--families", type=int, default=64, help="how many variants of the kernels to compile")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds after which to stop")
    options = parser.parse_args()
    path = available_path()
    kinds = families(options.seed, options.families)
    same = f"--seed {options.seed} --families {options.families}"
    print(f"{path.module.__name__} on {path.device}, {same}", flush=True)
    begun = shown = time.monotonic()
    failed, number, end = [], options.start, options.start + options.count
    while number < end and time.monotonic() - begun < options.budget:
        case = shape(number, options.seed, kinds, path)
        try:
            check_shape(path, case)
        except Exception as error:  # whatever a kernel raises is a failure of this shape
            failed.append(number)
            reason = str(error).strip().split("\n")[0] or traceback.format_exc(limit=-1).strip()
            print(f"FAILED {number}: {type(error).__name__}: {reason}\n  {case}", flush=True)
            if lost_the_device(error):
                print("The device is lost; the shapes after this one were not run.")
                end = number + 1
        number += 1
        if time.monotonic() - shown > 10:
            shown = time.monotonic()
            print(f"shape {number} of {end}, {len(failed)} failed, {shown - begun:.0f} s", flush=True)
    print(f"{number - options.start} shapes in {time.monotonic() - begun:.0f} s, {len(failed)} failed")
    for failure in failed:
        print(f"  python tests/support/random_shapes.py {same} --start {failure} --count 1")
    if number < end:
        print(f"Stopped by the budget; go on with: {same} --start {number} --count {end - number}")
    return 1 if failed else 0


if __name__ == "__main__":
    torch.manual_seed(0)
    if os.environ.get("TRITON_INTERPRET") == "1":
        from interpreter import mended
    else:
        mended = nullcontext
    with mended():
        sys.exit(main())
