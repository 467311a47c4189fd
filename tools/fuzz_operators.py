"""Hold every operator to its definition in float64 over thousands of random shapes.

    python -m tools.fuzz_operators                        10,000 shapes
    python -m tools.fuzz_operators --start 17 --count 1   repeats shape 17
    python -m tools.fuzz_operators --budget 300           stops after five minutes and says where to go on

Kernels run on a CUDA GPU. They are compiled anew for every operator, d, dtype, presence of masks and class of query length,
so a shape takes these from one of --families families, drawn with the seed. Lengths, numbers of documents and candidates
vary freely. Rows that do not count hold NaN, so that reading one shows. In one shape of 25 a token holds NaN or infinity,
and the scores must be NaN or infinite exactly where the definition says.
"""

import argparse
import random
import sys
import time

import torch

from tests.support.operator_checks import check
from tests.support.operators import OPERATORS, Problem, problem

DIMS = (1, 7, 16, 32, 48, 64, 96, 128, 200, 300, 768, 1024)
QUERY_LENGTHS = (1, 5, 32, 33, 128, 300)
DOCUMENT_LENGTHS = (1, 8, 63, 64, 65, 129, 255, 256, 700, 2000)
PLANT_EVERY = 25
# A few elements round worse than the root mean square of many, for which the tolerance of the tests is meant.
SLACK = 2.5


def options(
    number: int, seed: int, families: int, products: int, dtypes: tuple[torch.dtype, ...], of: str | None = None
) -> tuple[str, dict]:
    """An operator, or the one that is given, and arguments of ``problem``, of at most about ``products`` multiply-adds."""
    family = random.Random(f"{seed} {number % families}")
    operator = of or family.choice(list(OPERATORS))
    dim, dtype, query_length = family.choice(DIMS), family.choice(dtypes), family.choice(QUERY_LENGTHS)
    masked, listed, floored, gapless = (family.random() < share for share in (0.4, 0.4, 0.4, 0.3))
    if operator.startswith("residual"):
        dim = -(-dim // 8) * 8
    if operator.startswith(("from hidden", "project")):
        dim = max(7, min(dim, 200))  # vectors of one number are 1 or -1, whatever they are made of
    if operator.startswith("from hidden") and dtype in (torch.bfloat16, torch.float16):
        dtype = torch.float32  # gradients of projected vectors are rounded as well, and their sums cancel
    draw = random.Random(f"{seed} {number}")
    width = 100 if operator.startswith("splade") else query_length

    def lengths(count: int, longest: int) -> tuple[int, ...]:
        return tuple(draw.choice((0, 1, longest, draw.randint(0, longest))) for _ in range(count))

    longest = draw.choice([n for n in DOCUMENT_LENGTHS if n * dim * width <= products] or [1])
    budget = max(1, products // (dim * width * longest))
    num_queries = min(draw.choice((0, 1, 2, 5, 16)), budget)
    num_documents = min(draw.choice((0, 1, 2, 9, 40, 150)), max(1, budget // max(1, num_queries)))
    return operator, {
        "seed": draw.getrandbits(40),
        "dim": dim,
        "dtype": dtype,
        "queries": lengths(num_queries, query_length),
        "documents": lengths(num_documents, longest),
        "masked": masked,
        "gapless": gapless,
        "layout": "shared" if listed and num_documents else "all",
        "slots": draw.choice((0, 1, 3, 20)),
        "floor": floored,
    }


def plant(draw: random.Random, case: Problem) -> float | None:
    """Put NaN or infinity into one token that counts."""
    values = draw.choice(list(case.batches.values())).values
    live = (~values.isnan().any(dim=1)).nonzero().flatten().tolist()
    if not live:
        return None
    value = draw.choice((float("nan"), float("inf"), -float("inf")))
    values[draw.choice(live), draw.randrange(values.shape[1])] = value
    return value


def check_planted(name: str, case: Problem) -> None:
    """Scores are NaN and infinite exactly where those of the definition are."""
    doubled = case.with_leaves({leaf: values.double() for leaf, values in case.leaves.items()})
    exact = OPERATORS[name].definition(doubled)
    with_nan = {leaf: values.masked_fill(values.isinf(), torch.nan) for leaf, values in doubled.leaves.items()}
    users = OPERATORS[name].definition(doubled.with_leaves(with_nan)).isnan()
    dtype = case.queries.values.dtype
    for wanted in (True, False):
        leaves = {leaf: values.clone().requires_grad_(wanted) for leaf, values in case.leaves.items()}
        scores = OPERATORS[name].call(case.with_leaves(leaves)).detach().double()
        if case.queries.values.is_cuda and dtype == torch.float32:
            # Kernels multiply float32 in parts, of which those of infinity give NaN: allowed in the scores that use it.
            scores = torch.where(scores.isnan() & users, exact, scores)
        assert torch.equal(scores.isnan(), exact.isnan()), "NaN elsewhere than in the scores that use it"
        finite = exact.isfinite()
        assert torch.equal(scores[exact.isinf()], exact[exact.isinf()]), "infinite scores"
        torch.testing.assert_close(scores[finite], exact[finite], rtol=1e-3, atol=1e-3)


def check_shape(name: str, given: dict, number: int, device: str) -> None:
    """AssertionError, or what the operator itself raises, where it leaves the definition."""
    case, draw = problem(name, **given), random.Random(number)
    if name in ("maxsim", "xtr 5") and draw.randrange(PLANT_EVERY) == 0 and plant(draw, case) is not None:
        check_planted(name, case.to(device))
    else:
        few = sum(given["documents"]) < 4  # the rounding of one vector is in all of its scores
        check(name, case.to(device), slack=SLACK * (3 if few else 1), may_be_unclear=True)


def main(arguments: list[str] | None = None, device: str = "cpu") -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=10_000, help="how many shapes")
    parser.add_argument("--start", type=int, default=0, help="number of the first shape")
    parser.add_argument("--families", type=int, default=64, help="how many variants of the kernels to compile")
    parser.add_argument("--products", type=int, default=2**24, help="multiply-adds of a shape")
    parser.add_argument("--operator", choices=list(OPERATORS), help="all shapes of this one")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds after which to stop")
    given = parser.parse_args(arguments)
    begun, failed = time.monotonic(), []
    number, end = given.start, given.start + given.count
    dtypes = (torch.bfloat16, torch.float16, torch.float32) + ((torch.float64,) if device == "cpu" else ())
    while number < end and time.monotonic() - begun < given.budget:
        name, shape = options(number, given.seed, given.families, given.products, dtypes, given.operator)
        try:
            check_shape(name, shape, number, device)
        except Exception as error:  # whatever a kernel raises is a failure of this shape
            failed.append(number)
            said = str(error).strip().splitlines()[:1]
            print(f"FAILED {number}: {type(error).__name__}: {said}\n  {name} {shape}", flush=True)
        number += 1
    print(f"{number - given.start} shapes, failed: {failed}; next: --seed {given.seed} --start {number}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(device="cuda" if torch.cuda.is_available() else "cpu"))
