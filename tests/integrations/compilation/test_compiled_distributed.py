"""`enable(compile=True)` with gradient checkpointing in two real processes, however the model is wrapped."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from models import features, load_model, sentences
from pylate import losses
from ranks import run_cases
from sharding import data_parallel, flat_sharded, fully_sharded
from torch.distributed.tensor import DTensor

import pylate_fastmaxsim

pytestmark = pytest.mark.process

RANKS = 2


def _as_without_compiling(wrap: Callable) -> Callable[[str], None]:
    def run(folder: str) -> None:
        core = load_model(f"{folder}/modernbert").double().train()
        core[0].auto_model.gradient_checkpointing_enable({"use_reentrant": False})
        model = wrap(core)
        batches = [
            features(core, *(sentences(count, longest=8 + 8 * column, seed=dist.get_rank()) for column in range(3)))
            for count in (6, 4)
        ]
        loss_function = losses.Contrastive(model)

        def steps():
            found = []
            for batch in batches:
                model.zero_grad()
                loss = loss_function([dict(column) for column in batch])
                loss.backward()
                gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
                found.append((loss.detach(), {name: own_part(gradient) for name, gradient in gradients.items()}))
            return found

        with pylate_fastmaxsim.enabled():
            expected = steps()
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        with pylate_fastmaxsim.enabled(compile=True):
            ours = steps()
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
        torch.testing.assert_close(ours, expected, atol=1e-9, rtol=1e-7)

    return run


def own_part(gradient: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a gradient, on its own."""
    return (gradient.to_local() if isinstance(gradient, DTensor) else gradient).clone()


def _traced_only(case: Callable[[str], None]) -> Callable[[str], None]:
    """What a process traces is run as it is, which takes a third of the time of compiling it."""

    def run(folder: str) -> None:
        compile_function = torch.compile
        torch.compile = partial(compile_function, backend="eager")
        try:
            case(folder)
        finally:
            torch.compile = compile_function

    return run


def _layers_share_what_is_compiled(folder: str) -> None:
    compiled, calls = [], []

    def backend(graph, inputs):
        compiled.append(graph)
        return lambda *values: calls.append(graph) or graph(*values)

    def counted(wrap: Callable) -> tuple[int, int]:
        torch._dynamo.reset()
        compiled.clear()
        core = load_model(f"{folder}/modernbert").train()
        model = wrap(core)
        batch = features(core, *(sentences(6, longest=8 + 8 * column) for column in range(3)))
        with pylate_fastmaxsim.enabled(compile=True):
            for _ in range(2):
                calls.clear()
                losses.Contrastive(model)([dict(column) for column in batch]).backward()
        return len(compiled), len(calls)

    compile_function = torch.compile
    torch.compile = partial(compile_function, backend=backend)
    # As large as the layers are, in proportion: by its default all parameters of so small a model are sent as one.
    bucket, dist._DEFAULT_FIRST_BUCKET_BYTES = dist._DEFAULT_FIRST_BUCKET_BYTES, 1024
    try:
        assert counted(partial(data_parallel, bucket_cap_mb=0.002)) == counted(lambda model: model)
    finally:
        torch.compile, dist._DEFAULT_FIRST_BUCKET_BYTES = compile_function, bucket


CASES = {
    wrap.__name__: _traced_only(_as_without_compiling(wrap)) for wrap in (data_parallel, flat_sharded, fully_sharded)
}
CASES["layers share what is compiled"] = _layers_share_what_is_compiled


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    return run_cases("test_compiled_distributed", RANKS, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", CASES)
def test_as_without_compiling(outcome, name):
    assert outcome(name) == ["passed"] * RANKS
