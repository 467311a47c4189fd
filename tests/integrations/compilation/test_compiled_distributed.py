"""`enable(compile=True)` with gradient checkpointing in two real processes, however the model is wrapped."""

from collections.abc import Callable
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from pylate import losses

import pylate_fastmaxsim
from tests.support.models import features, load_model, sentences
from tests.support.rank_steps import compare_host
from tests.support.sharding import data_parallel, fully_sharded

pytestmark = pytest.mark.process

RANKS = 2


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


CASES = {
    wrap.__name__: compare_host("PyLate", "contrastive", wrap, checkpointing=True, compiled=True)
    for wrap in (data_parallel, fully_sharded)
}
CASES["layers share what is compiled"] = _layers_share_what_is_compiled


@pytest.mark.parametrize("name", CASES)
def test_two_processes(outcomes, name):
    assert outcomes(name) == ["passed"] * RANKS
