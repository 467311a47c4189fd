"""Every tile configuration of the tables on the GPU at hand, also those of other architectures, against float64."""

import pytest
import torch

from tests.support.operator_checks import check
from tests.support.operators import lengths, problem

pytest.importorskip("triton")

from inspect import unwrap  # noqa: E402

from triton.runtime.errors import OutOfResources  # noqa: E402

from pylate_fastmaxsim.kernels.maxsim import launch as scores  # noqa: E402
from pylate_fastmaxsim.kernels.maxsim import tiles as forward_tiles  # noqa: E402
from pylate_fastmaxsim.kernels.winner_backward import launch as gradients  # noqa: E402
from pylate_fastmaxsim.kernels.winner_backward import tiles as backward_tiles  # noqa: E402

pytestmark = pytest.mark.cuda

INPUTS = {
    "half": (torch.bfloat16, "highest"),
    "bf16x6": (torch.float32, "highest"),
    "bf16x3": (torch.float32, "high"),
    "tf32": (torch.float32, "medium"),
}
TABLES = {
    "forward": [value for name, value in vars(forward_tiles).items() if name.startswith("_FORWARD")],
    "query_gradient": [backward_tiles._QUERY_GRADIENT],  # the tables themselves are what is tested
    "document_gradient": [backward_tiles._DOCUMENT_GRADIENT],
    "candidate_gradient": [backward_tiles._CANDIDATE_GRADIENT],
}


def configurations():
    """Family, arithmetic, largest d and tiles of every row, each once."""
    found = {}
    for family, tables in TABLES.items():
        for table in tables:
            for key, rows in table.items():
                kind = key if isinstance(key, str) else key[1]
                for largest, tiles in rows:
                    found[family, kind, largest or 768, tiles] = None
    return list(found)


@pytest.mark.parametrize("family, kind, dim, tiles", configurations(), ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_tiles(family, kind, dim, tiles, seed, monkeypatch):
    # As many documents a program as the table says, of which so few rows would leave one.
    monkeypatch.setattr(forward_tiles, "ENOUGH_ROWS", 0)
    launch = scores if family == "forward" else gradients
    monkeypatch.setattr(launch, f"{family}_tiles", lambda *_: tiles)
    if family == "forward":
        monkeypatch.setattr(scores, "_plan", unwrap(scores._plan))  # which would keep the plan of other tiles
    dtype, precision = INPUTS[kind]
    listed = family == "candidate_gradient" or (family != "document_gradient" and seed == 1)
    sizes = {"queries": lengths(seed, 19, (32, 300, 9)[seed]), "documents": lengths(9, 37, (300, 180, 700)[seed])}
    sizes |= {"dim": dim, "dtype": dtype, "masked": seed > 0, "gapless": seed != 1, "slots": 5, "device": "cuda"}
    try:
        case = problem("maxsim", seed, layout="shared" if listed else "all", **sizes)
        check("maxsim", case, precision=precision, may_be_unclear=True)
    except OutOfResources as error:
        pytest.skip(f"made for a GPU with more shared memory: {error}")
