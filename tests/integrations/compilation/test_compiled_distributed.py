"""`enable(compile=True)` with gradient checkpointing in two real processes, however the model is wrapped."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from pylate import losses

import pylate_fastmaxsim
from tests.support.models import features, load_model, sentences
from tests.support.ranks import loss_and_gradients
from tests.support.sharding import data_parallel, fully_sharded

pytestmark = pytest.mark.process

RANKS = 2


def _as_without_compiling(wrap: Callable) -> Callable[[str], None]:
    def run(folder: str) -> None:
        core = load_model(f"{folder}/modernbert").double().train()
        core[0].auto_model.gradient_checkpointing_enable({"use_reentrant": False})
        model = wrap(core)
        seed = dist.get_rank()
        texts = [[sentences(n, longest=8 + 8 * column, seed=seed) for column in range(3)] for n in (6, 4)]

        def step(batch):
            loss, gradients = loss_and_gradients(model, losses.Contrastive(model), batch)
            return loss, {name: getattr(each, "_local_tensor", each).clone() for name, each in gradients.items()}

        batches = [features(core, *columns) for columns in texts]
        with pylate_fastmaxsim.enabled():
            expected = [step(batch) for batch in batches]
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        # What a process traces is run as it is, which takes a third of the time of compiling it.
        traced = patch.object(torch, "compile", partial(torch.compile, backend="eager"))
        with traced, pylate_fastmaxsim.enabled(compile=True):
            ours = [step(batch) for batch in batches]
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
        torch.testing.assert_close(ours, expected, atol=1e-9, rtol=1e-7)

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

    # As large as the layers are, in proportion: by its default all parameters of so small a model are sent as one.
    small = patch.object(dist, "_DEFAULT_FIRST_BUCKET_BYTES", 1024)
    with small, patch.object(torch, "compile", partial(torch.compile, backend=backend)):
        assert counted(partial(data_parallel, bucket_cap_mb=0.002)) == counted(lambda model: model)


CASES = {wrap.__name__: _as_without_compiling(wrap) for wrap in (data_parallel, fully_sharded)}
CASES["layers share what is compiled"] = _layers_share_what_is_compiled


@pytest.mark.parametrize("name", CASES)
def test_two_processes(outcomes, name):
    assert outcomes(name) == ["passed"] * RANKS
