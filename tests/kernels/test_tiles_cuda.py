"""Every tile configuration of the tables on the GPU at hand, also those of other architectures, against float64."""

import pytest
import torch

from tests.support import exactness
from tests.support.chosen_tiles import choose_tiles
from tests.support.on_gpu import DEVICE, ragged

pytest.importorskip("triton")

from triton.runtime.errors import OutOfResources  # noqa: E402

from pylate_fastmaxsim.kernels.maxsim import launch as scores  # noqa: E402
from pylate_fastmaxsim.kernels.maxsim import tiles as forward_tiles  # noqa: E402
from pylate_fastmaxsim.kernels.winner_backward import launch as gradients  # noqa: E402
from pylate_fastmaxsim.kernels.winner_backward import tiles as backward_tiles  # noqa: E402
from tests.support import maxsim_kernels  # noqa: E402

pytestmark = pytest.mark.cuda

INPUTS = {
    "half": (torch.bfloat16, "highest"),
    "bf16x6": (torch.float32, "highest"),
    "bf16x3": (torch.float32, "high"),
    "tf32": (torch.float32, "medium"),
}
TABLES = {
    "forward": (
        forward_tiles._FORWARD,
        forward_tiles._FORWARD_OF_FEW_ROWS,
        forward_tiles._FORWARD_WITH_WINNERS,
        forward_tiles._FORWARD_OF_LONG_QUERIES_WITH_WINNERS,
    ),
    "query_gradient": (backward_tiles._QUERY_GRADIENT,),
    "document_gradient": (backward_tiles._DOCUMENT_GRADIENT,),
    "candidate_gradient": (backward_tiles._CANDIDATE_GRADIENT,),
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
    monkeypatch.setattr(forward_tiles, "_ENOUGH_ROWS", 0)
    dtype, precision = INPUTS[kind]
    generator = torch.Generator().manual_seed(seed)
    masked = (None, 0.7, 0.9)[seed]
    queries = ragged(generator, 19, (32, 300, 9)[seed], dim, dtype, keep=masked, gap=seed % 2)
    documents = ragged(generator, 37, (300, 180, 700)[seed], dim, dtype, keep=masked, gap=seed % 2)
    candidates = None
    if family == "candidate_gradient" or (family != "document_gradient" and seed == 1):
        candidates = torch.randint(37, (19, 5), generator=generator).to(DEVICE)
    choose_tiles(monkeypatch, scores if family == "forward" else gradients, **{family: tiles})
    try:
        exactness.check(maxsim_kernels, queries, documents, candidates, precision=precision)
    except OutOfResources as error:
        pytest.skip(f"made for a GPU with more shared memory: {error}")
