"""The kernels of token pooling give SciPy's clusters, in its order, whatever is in the way: ties, masks, waves, other Tritons."""

import pytest
import torch

pytest.importorskip("triton")

from pylate_fastmaxsim import TokenBatch, pool_tokens
from pylate_fastmaxsim.kernels.token_pooling import launch
from tests.ops.test_token_pooling import OPTIONS, documents
from tests.support.interpreter import interpreted  # noqa: F401
from tests.support.kernels_on_cpu import kernels_on_cpu
from tests.support.on_gpu import no_waiting


def check(batch: TokenBatch, device: str, **options) -> None:
    expected = pool_tokens(batch, **options)
    tensors = (each.to(device) for each in (batch.values, batch.starts, batch.lengths))
    moved = TokenBatch(*tensors, batch.max_length, None if batch.keep is None else batch.keep.to(device), batch.gapless)
    if device == "cpu":
        with kernels_on_cpu():
            pooled = pool_tokens(moved, **options)
    else:
        pool_tokens(moved, **options)
        with no_waiting():
            pooled = pool_tokens(moved, **options)
    assert torch.equal(pooled.lengths.cpu(), expected.lengths) and torch.equal(pooled.starts.cpu(), expected.starts)
    # A mean that lies between two bfloat16 may become either.
    rounding = 2**-7 if batch.values.dtype == torch.bfloat16 else 1e-6
    torch.testing.assert_close(pooled.values.cpu(), expected.values, rtol=rounding, atol=1e-6)


def unmasked_on_a_cpu(patch) -> None:
    """The operators of the process on the CPU's way, from which the interpreted ones would turn it."""
    patch.setattr("pylate_fastmaxsim.ops.operands.runs_kernels", lambda values: False)


@pytest.mark.interpret
@pytest.mark.parametrize("integers", [False, True], ids=["random", "ties"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_clusters_are_those_of_scipy(interpreted, options, integers, monkeypatch):  # noqa: F811
    unmasked_on_a_cpu(monkeypatch)
    check(documents(integers=integers, masked="protected" in options), "cpu", **options)


@pytest.mark.interpret
def test_in_waves_and_without_products_of_float64(interpreted, monkeypatch):  # noqa: F811
    unmasked_on_a_cpu(monkeypatch)
    monkeypatch.setattr(launch, "DISTANCES_BYTES", 0)
    monkeypatch.setattr(launch, "_HAS_DOT", False)
    made, distances = [], launch.distances_kernel
    monkeypatch.setattr(launch, "distances_kernel", Counted(distances, made))
    check(documents(seed=1), "cpu", factor=2)
    assert len(made) > 1


class Counted:
    def __init__(self, kernel, made):
        self.kernel, self.made = kernel, made

    def __getitem__(self, grid):
        self.made.append(grid)
        return self.kernel[grid]


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_without_waiting(dtype):
    lengths = torch.randint(1, 400, (64,), generator=torch.Generator().manual_seed(0)).tolist()
    values = torch.nn.functional.normalize(torch.randn(sum(lengths), 48), dim=-1).to(dtype)
    batch = TokenBatch.from_list(list(values.split(lengths)))
    for options in OPTIONS.values():
        check(batch, "cuda", **options)
