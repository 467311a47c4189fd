"""Losses in two real processes, under DistributedDataParallel and with documents gathered from both."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from pylate import losses
from pylate.scores import ColBERTScores, XTRScores
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

import pylate_fastmaxsim
from pylate_fastmaxsim.integrations.encoding import attention as encoding_attention
from pylate_fastmaxsim.integrations.encoding import equivalence, masks, modes
from pylate_fastmaxsim.integrations.models.wrappers import unwrap
from tests.support.models import attend_to_own_document, load_model
from tests.support.rank_steps import batch_of, compare
from tests.support.sharding import data_parallel, encoder_sharded, flat_sharded, fully_sharded

pytestmark = pytest.mark.process

RANKS = 2


def _log(module: torch.nn.Module, _args: tuple, _output: object) -> None:
    """A forward hook of somebody's own."""


def _hook(core, rank: int) -> None:
    if rank == 0:
        core[0].auto_model.layers[0].register_forward_hook(_log)


def _pack(core, rank: int) -> None:
    if rank == 0:
        encoding_attention.variable_length_attention = attend_to_own_document


def _find_a_difference(core, rank: int) -> None:
    """Neither packing nor grouping gives what padding does."""
    encoding_attention.variable_length_attention = attend_to_own_document
    if rank == 1:
        equivalence._TOLERANCE = dict.fromkeys(equivalence._TOLERANCE, -1.0)


def _change_masks(core, rank: int) -> None:
    def leave_out(_module, args):
        if rank == 1:
            args[0]["attention_mask"][:, 2::3] = 0

    core.register_forward_pre_hook(leave_out)


def _ranks_that_differ(
    wrap: Callable,
    change: Callable | None = None,
    mode: str | None = None,
    queries: tuple[int, int] = (6, 6),
    of_one: dict | None = None,
    **options,
) -> Callable[[str], None]:
    """All ranks encode alike, as stock does, and none waits for another."""

    def run(folder: str) -> None:
        rank = dist.get_rank()
        core = load_model(f"{folder}/modernbert").double()
        batch, model = batch_of(core, rank, queries[rank]), wrap(core)
        loss_function = losses.Contrastive(model, **options, **((of_one or {}) if rank == 1 else {}))

        def step() -> list[float]:
            model.zero_grad()
            loss = loss_function([{key: value.clone() for key, value in column.items()} for column in batch])
            loss.backward()
            gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
            local = [getattr(gradient, "_local_tensor", gradient) for gradient in gradients]
            return [loss.item(), *(part.norm().item() for part in local)]

        with patch.object(equivalence, "_TOLERANCE", equivalence._TOLERANCE):
            if change is not None:
                change(core, rank)
            stock = step()
            with pylate_fastmaxsim.enabled(stock_masking=True):
                for _ in range(2):
                    assert step() == pytest.approx(stock, rel=1e-8, abs=1e-10)
                assert mode is None or set(modes.chosen[unwrap(model)].values()) == {mode}
                assert change is not _change_masks or masks.changes_masks(loss_function)

    return run


def _static_graph(folder: str) -> None:
    """The ranks have as many documents, but the last batch has fewer, and so fewer groups: gradients are exchanged."""
    rank = dist.get_rank()
    core = load_model(f"{folder}/modernbert").double()
    core[0].auto_model.gradient_checkpointing_enable({"use_reentrant": True})
    core[0].auto_model.enable_input_require_grads()
    batches = [batch_of(core, rank, queries) for queries in (9, 9, 2)]

    def steps() -> list[float]:
        model = DistributedDataParallel(core, static_graph=True, broadcast_buffers=False)
        loss_function, found = losses.Contrastive(model), []
        for batch in batches:
            core.zero_grad()
            loss_function([dict(column) for column in batch]).backward()
            found += [weight.grad.norm().item() for weight in core.parameters()]
        return found

    stock = steps()
    with pylate_fastmaxsim.enabled(stock_masking=True):
        assert steps() == pytest.approx(stock, rel=1e-8, abs=1e-10)


def _without_the_others(folder: str) -> None:
    """One rank validates, also by an averaged copy of the model, while the others wait for it."""
    core = load_model(f"{folder}/modernbert").double()
    model = DistributedDataParallel(core, broadcast_buffers=False)
    averaged = AveragedModel(core)
    for enabled in (False, True):
        if enabled:
            pylate_fastmaxsim.enable(stock_masking=True)
        losses.Contrastive(model)(batch_of(core, dist.get_rank())).backward()
        if dist.get_rank() == 0:
            cached = [losses.CachedContrastive(one, mini_batch_size=2) for one in (model, averaged)]
            with torch.no_grad():
                found = [loss(batch_of(core, 0)).item() for loss in (losses.Contrastive(averaged), *cached)]
            assert found == pytest.approx(found[:1] * 3)
        dist.barrier()


class _Scale(torch.nn.Module):
    """Of queries only: a weight that the last call of the encoder, which is of documents, does without."""

    def __init__(self, query_length: int) -> None:
        super().__init__()
        self.query_length, self.weight = query_length, torch.nn.Parameter(torch.tensor(2.0, dtype=torch.float64))

    def forward(self, features: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        embeddings = features["token_embeddings"]
        if features["input_ids"].shape[1] == self.query_length:
            embeddings = torch.cat([embeddings[..., :1] * self.weight, embeddings[..., 1:]], dim=-1)
        return {**features, "token_embeddings": embeddings}


def _sent_once(packed: bool, scaled: bool) -> Callable[[str], None]:
    """A step of GradCache sends the gradients of all passes together, and none while its caller accumulates them."""

    def run(folder: str) -> None:
        core = load_model(f"{folder}/modernbert", query_length=12).double()
        batch = batch_of(core, dist.get_rank())
        if scaled:
            core.append(_Scale(query_length=12))
        if packed:
            encoding_attention.variable_length_attention = attend_to_own_document
        model = DistributedDataParallel(core, find_unused_parameters=scaled)
        sent = []

        def send(group, bucket):
            sent.append(bucket.is_last())  # of an exchange of all gradients
            return allreduce_hook(group, bucket)

        model.register_comm_hook(None, send)
        loss_function = losses.CachedContrastive(model, mini_batch_size=2)

        def backward() -> int:
            sent.clear()
            loss_function([dict(column) for column in batch]).backward()
            return sum(sent)

        def step() -> tuple[int, list[torch.Tensor]]:
            core.zero_grad()
            return backward(), [weight.grad.clone() for weight in core.parameters()]

        exchanges, stock = step()
        assert exchanges == 9  # of three columns of six
        assert stock[-1].any()
        with pylate_fastmaxsim.enabled(stock_masking=True):
            for _ in range(2):
                exchanges, ours = step()
                assert exchanges == 1
                for of_ours, of_stock in zip(ours, stock, strict=True):
                    torch.testing.assert_close(of_ours, of_stock, rtol=1e-10, atol=1e-10)
            core.zero_grad()
            with model.no_sync():
                assert backward() == 0
            assert backward() == 1
            for weight, of_stock in zip(core.parameters(), stock, strict=True):
                torch.testing.assert_close(weight.grad, 2 * of_stock, rtol=1e-10, atol=1e-10)

    return run


def _too_few_to_divide(folder: str) -> None:
    """The last batch of one rank has fewer texts than the other has mini-batches: both say so, and both go on."""
    core = load_model(f"{folder}/modernbert").double()
    loss_function = losses.CachedContrastive(DistributedDataParallel(core), mini_batch_size=1)
    pylate_fastmaxsim.enable()
    with pytest.raises(ValueError, match="another has only [0-9]+ texts to divide.*dataloader_drop_last=True"):
        loss_function(batch_of(core, dist.get_rank(), (2, 9)[dist.get_rank()]))
    loss_function(batch_of(core, dist.get_rank())).backward()


_CONTRASTIVE, _CACHED = losses.Contrastive, partial(losses.CachedContrastive, mini_batch_size=2)
_unbuffered = partial(data_parallel, broadcast_buffers=False)

CASES = {
    "contrastive gathered without ddp": compare(_CONTRASTIVE, False, True, gather_across_devices=True),
    "contrastive grouped": compare(_CONTRASTIVE, True, False),
    "cached grouped": compare(_CACHED, True, False),
    # Short enough that some documents have no masked token, which stock's masking treats differently.
    "short": compare(_CONTRASTIVE, True, True, document_length=6, gather_across_devices=True),
    "checkpointing": compare(_CONTRASTIVE, True, True, checkpointing=True),
    "options": compare(
        _CACHED, True, True, gather_across_devices=True, size_average=False, temperature=0.1, score_mini_batch_size=4
    ),
    # Stock rounds these scores to float32. No row has its 46th largest similarity twice, as the 40th: which of equal
    # ones stock lets through depends on the last bit.
    "xtr": compare(_CACHED, True, True, tolerance=1e-5, gather_across_devices=True, score_metric=XTRScores(46)),
    "one packs": _ranks_that_differ(data_parallel, _pack, "grouped"),
    "one finds a difference": _ranks_that_differ(fully_sharded, _find_a_difference, "padded"),
    "one has a hook": _ranks_that_differ(data_parallel, _hook, "padded"),
    "one has a hook, sharded": _ranks_that_differ(fully_sharded, _hook, "padded"),
    "one changes masks": _ranks_that_differ(_unbuffered, _change_masks, gather_across_devices=True),
    "one changes masks, sharded": _ranks_that_differ(fully_sharded, _change_masks, gather_across_devices=True),
    "one has scores of its own": _ranks_that_differ(
        _unbuffered, of_one={"score_metric": lambda *args, **kwargs: ColBERTScores()(*args, **kwargs)}
    ),
    "one validates": _without_the_others,
    "static graph": _static_graph,
    "too few documents": _too_few_to_divide,
    "sent once packed": _sent_once(packed=True, scaled=False),
    "sent once scaled": _sent_once(packed=False, scaled=True),
}
for _wrap in (data_parallel, flat_sharded, fully_sharded, encoder_sharded):
    CASES[f"other numbers of documents {_wrap.__name__}"] = _ranks_that_differ(_wrap, queries=(9, 2))


@pytest.mark.parametrize("case", CASES)
def test_two_processes(outcomes, case):
    assert outcomes(case) == ["passed"] * RANKS
