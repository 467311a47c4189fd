"""Losses in two real processes, under DistributedDataParallel and with documents gathered from both."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from pylate import losses
from pylate.scores import ColBERTScores, XTRScores
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

import pylate_fastmaxsim
from pylate_fastmaxsim import PooledScores, Softmax, TopK
from pylate_fastmaxsim.integrations.encoding import attention as encoding_attention
from pylate_fastmaxsim.integrations.encoding import masks, modes
from pylate_fastmaxsim.integrations.models.wrappers import unwrap
from tests.support.models import Behind, attend_to_own_document, load_model, looking
from tests.support.rank_steps import batch_of, compare_host
from tests.support.sharding import data_parallel, encoder_sharded, flat_sharded, fully_sharded

pytestmark = pytest.mark.process

RANKS = 2


def _hook(core, rank: int) -> None:
    if rank == 0:
        core[0].auto_model.layers[0].register_forward_hook(lambda *_: None)


def _pack(core, rank: int) -> None:
    if rank == 0:
        encoding_attention.variable_length_attention = attend_to_own_document


def _centre(core, rank: int) -> None:
    """On one rank neither packing nor grouping gives what padding does."""
    encoding_attention.variable_length_attention = attend_to_own_document
    if rank == 1:
        centred = looking(lambda _module, _args, states: states - states.mean(dim=(0, 1)))
        core[0].auto_model.layers[0].register_forward_hook(centred)


def _change_masks(core, rank: int) -> None:
    def leave_out(_module, args):
        if rank == 1:
            args[0]["attention_mask"][:, 2::3] = 0

    core.register_forward_pre_hook(leave_out)


def _ranks_that_differ(
    folder: str,
    wrap: Callable,
    change: Callable | None = None,
    mode: str | None = None,
    queries: tuple[int, int] = (6, 6),
    own_scores: bool = False,
    **options,
) -> None:
    """All ranks encode alike, as stock does, and none waits for another."""
    rank = dist.get_rank()
    core = load_model(f"{folder}/modernbert").double()
    batch, model = batch_of(core, rank, queries[rank]), wrap(core)
    if own_scores and rank == 1:
        options["score_metric"] = lambda *args, **kwargs: ColBERTScores()(*args, **kwargs)
    loss_function = losses.Contrastive(model, **options)

    def step() -> list[float]:
        model.zero_grad()
        loss = loss_function([{key: value.clone() for key, value in column.items()} for column in batch])
        loss.backward()
        gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
        local = [getattr(gradient, "_local_tensor", gradient) for gradient in gradients]
        return [loss.item(), *(part.norm().item() for part in local)]

    if change is not None:
        change(core, rank)
    stock = step()
    with pylate_fastmaxsim.enabled(stock_masking=True):
        for _ in range(2):
            assert step() == pytest.approx(stock, rel=1e-8, abs=1e-10)
        assert mode is None or set(modes.chosen[unwrap(model)].values()) == {mode}
        assert change is not _change_masks or masks.changes_masks(loss_function)


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


def _sent_once(folder: str) -> None:
    """A step of GradCache sends the gradients of all passes together, and none while its caller accumulates them."""
    core = load_model(f"{folder}/modernbert").double()
    batch = batch_of(core, dist.get_rank())
    encoding_attention.variable_length_attention = attend_to_own_document
    model = DistributedDataParallel(core)
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


class _Reads(Behind):
    def change(self, features):
        return features


def _later_batch(folder: str, wide: bool = False) -> None:
    """What ranks that encoded alike cannot encode alike any more is an error on each of them."""
    core = load_model(f"{folder}/modernbert").double()
    queries, *documents = batch_of(core, dist.get_rank())
    if wide:
        sentence = "they have 13 tokens, more than .* query_length of 12"
        later = [{key: F.pad(values, (0, 1)) for key, values in queries.items()}, *documents]
    else:
        core[1], sentence = _Reads(core[1]), "_Reads may read prompt_length. All processes must encode alike"
        later = [queries, *({**column, "prompt_length": torch.full((6,), 2)} for column in documents)]
    encoding_attention.variable_length_attention = attend_to_own_document
    loss_function = losses.Contrastive(DistributedDataParallel(core))
    pylate_fastmaxsim.enable(padding_free="always")
    loss_function([queries, *documents])
    with pytest.raises(ValueError, match=sentence):
        loss_function(later)


def _too_few_to_divide(folder: str) -> None:
    """The last batch of one rank has fewer texts than the other has mini-batches: both say so, and both go on."""
    core = load_model(f"{folder}/modernbert").double()
    loss_function = losses.CachedContrastive(DistributedDataParallel(core), mini_batch_size=1)
    pylate_fastmaxsim.enable()
    with pytest.raises(ValueError, match="another has only [0-9]+ texts to divide.*dataloader_drop_last=True"):
        loss_function(batch_of(core, dist.get_rank(), (2, 9)[dist.get_rank()]))
    loss_function(batch_of(core, dist.get_rank())).backward()


GATHERED = {"gather_across_devices": True}
SOFTMAX = PooledScores(Softmax(0.1), length_normalize=True)
_unbuffered = partial(data_parallel, broadcast_buffers=False)
_static = partial(_unbuffered, static_graph=True)

CASES = {
    "contrastive gathered without ddp": compare_host("PyLate", "contrastive", lambda model: model, **GATHERED),
    "cached grouped": compare_host("PyLate", "cached", packs=(False, False), mini_batch_size=2),
    # Short enough that some documents have no masked token, which stock's masking treats differently.
    "short": compare_host("PyLate", "contrastive", load={"document_length": 6}, **GATHERED),
    "checkpointing": compare_host("PyLate", "contrastive", checkpointing=True),
    "options": compare_host(
        "PyLate", "cached", mini_batch_size=2, size_average=False, temperature=0.1, score_mini_batch_size=4, **GATHERED
    ),
    # No row has its 46th largest similarity twice, as the 40th: which of equal ones stock lets through depends on the
    # last bit.
    "xtr": compare_host("PyLate", "cached", mini_batch_size=2, score_metric=XTRScores(46), **GATHERED),
    "top-k": compare_host("PyLate", "contrastive", score_metric=PooledScores(TopK(3)), **GATHERED),
    "cached softmax": compare_host("PyLate", "cached", mini_batch_size=2, score_metric=SOFTMAX, **GATHERED),
    "one packs": partial(_ranks_that_differ, wrap=data_parallel, change=_pack, mode="grouped"),
    "one finds a difference": partial(_ranks_that_differ, wrap=fully_sharded, change=_centre, mode="padded"),
    "one has a hook": partial(_ranks_that_differ, wrap=data_parallel, change=_hook, mode="padded"),
    "one has a hook, sharded": partial(_ranks_that_differ, wrap=fully_sharded, change=_hook, mode="padded"),
    "one changes masks": partial(_ranks_that_differ, wrap=_unbuffered, change=_change_masks, **GATHERED),
    "one changes masks, sharded": partial(_ranks_that_differ, wrap=fully_sharded, change=_change_masks, **GATHERED),
    "one has scores of its own": partial(_ranks_that_differ, wrap=_unbuffered, own_scores=True),
    "one validates": _without_the_others,
    "static graph": compare_host("PyLate", "contrastive", _static, mode="padded", checkpointing=True),
    "too few documents": _too_few_to_divide,
    "sent once": _sent_once,
    "a later batch has features": _later_batch,
    "a later batch is wide": partial(_later_batch, wide=True),
}
for _wrap in (data_parallel, flat_sharded, fully_sharded, encoder_sharded):
    CASES[f"other numbers of documents {_wrap.__name__}"] = partial(_ranks_that_differ, wrap=_wrap, queries=(9, 2))


@pytest.mark.parametrize("case", CASES)
def test_two_processes(outcomes, case):
    assert outcomes(case) == ["passed"] * RANKS
