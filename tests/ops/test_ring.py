"""The ring in 2 and 4 processes has the scores and gradients of gathering, and its losses those of PyLate."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from models import attend_to_own_document, features, load_model, sentences
from pooled_definitions import PlainScores
from pylate import losses
from ranks import loss_and_gradients, run_cases
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import pylate_fastmaxsim
from pylate_fastmaxsim import (
    LogSumExp,
    Max,
    PooledScores,
    Softmax,
    TokenBatch,
    TopK,
    _winners,
    maxsim,
    pooled_scores,
)
from pylate_fastmaxsim.integrations.encoding import attention as encoding_attention
from pylate_fastmaxsim.integrations.pylate import losses as pylate_losses
from pylate_fastmaxsim.ops.distributed import ring as distributed_ring
from pylate_fastmaxsim.ops.distributed.gather import gather_documents
from pylate_fastmaxsim.ops.distributed.ring import ring_maxsim
from pylate_fastmaxsim.ops.pooled import Pooling

DIM = 8


def _documents(rank: int, count: int, longest: int, dtype: torch.dtype) -> TokenBatch:
    """Documents of a rank, with lengths of its own and masked tokens; the last rank but one has no token at all."""
    generator = torch.Generator().manual_seed(100 + rank)
    lengths = torch.randint(0, longest * (rank + 1), (count,), generator=generator)
    if rank == 1:
        lengths.zero_()
    rows = int(lengths.sum())
    values = torch.randn(rows, DIM, generator=generator, dtype=torch.float64).to(dtype)
    keep = torch.rand(rows, generator=generator) < 0.8
    return TokenBatch(values, lengths.cumsum(0) - lengths, lengths, max([0, *lengths.tolist()]), keep)


def _queries(rank: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Queries of a rank, in a number of its own."""
    generator = torch.Generator().manual_seed(rank)
    queries = torch.randn(3 + rank, 5, DIM, generator=generator, dtype=torch.float64).to(dtype)
    return queries, torch.rand(3 + rank, 5, generator=generator) < 0.9


def _together(batches: list[TokenBatch]) -> TokenBatch:
    starts = [batch.starts + sum(len(b.values) for b in batches[:rank]) for rank, batch in enumerate(batches)]
    return TokenBatch(
        torch.cat([batch.values for batch in batches]),
        torch.cat(starts),
        torch.cat([batch.lengths for batch in batches]),
        max(batch.max_length for batch in batches),
        torch.cat([batch.keep for batch in batches]),
    )


def _operator(
    dtype: torch.dtype = torch.float64,
    tolerance: float = 1e-12,
    grad_filter: str | None = None,
    floor: bool = False,
    kept: int = distributed_ring.KEPT_STATE_BYTES,
    at_once: int = _winners._AT_ONCE_BYTES,
    autocast: bool = False,
    pooling: Pooling = Max(),
) -> Callable[[str], None]:
    """The operator against MaxSim of all queries and all documents in one process."""

    def run(folder: str) -> None:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        shards = [_documents(other, 6, 7, dtype) for other in range(ranks)]
        queries = [_queries(other, dtype) for other in range(ranks)]
        floors = [torch.arange(6) % (2 + other) == 0 if floor else None for other in range(ranks)]
        weights = [
            torch.randn(3 + other, 6 * ranks, generator=torch.Generator().manual_seed(other)).pow(9)
            for other in range(ranks)
        ]
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            everything = _together(shards)
            everything.values.requires_grad_()
            expected, grad_queries = [], []
            for (values, mask), weight in zip(queries, weights, strict=True):
                values.requires_grad_()
                floor_of_all = torch.cat(floors) if floor else None
                options = {"queries_mask": mask, "grad_filter": grad_filter}
                if floor:
                    scores = maxsim(values, everything, zero_floor=floor_of_all, **options)
                else:
                    scores = pooled_scores(values, everything, pooling=pooling, **options)
                scores.backward(weight.to(scores.dtype))
                expected.append(scores.detach())
                grad_queries.append(values.grad)

            own = {"queries_mask": queries[rank][1], "zero_floor": floors[rank], "pooling": pooling}

            def step() -> tuple[Tensor, Tensor, Tensor]:
                values = queries[rank][0].detach().requires_grad_()
                documents = shards[rank].with_values(shards[rank].values.detach().requires_grad_())
                scores = ring_maxsim(values, documents, grad_filter=grad_filter, **own)
                scores.backward(weights[rank].to(scores.dtype))
                return scores.detach(), values.grad, documents.values.grad

            before = distributed_ring.KEPT_STATE_BYTES, _winners._AT_ONCE_BYTES
            distributed_ring.KEPT_STATE_BYTES, _winners._AT_ONCE_BYTES = kept, at_once
            try:
                ours, again = step(), step()
                with torch.no_grad():
                    scores = ring_maxsim(queries[rank][0], shards[rank], **own)
            finally:
                distributed_ring.KEPT_STATE_BYTES, _winners._AT_ONCE_BYTES = before
        first = sum(len(shard.values) for shard in shards[:rank])
        of_documents = everything.values.grad[first : first + len(shards[rank].values)]
        for name, our, gold in zip(
            ("scores", "queries", "documents"), ours, (expected[rank], grad_queries[rank], of_documents), strict=True
        ):
            assert our.dtype == gold.dtype and our.shape == gold.shape, name
            assert (our - gold).abs().max() <= tolerance * gold.abs().max() if our.numel() else True, name
        assert all(torch.equal(one, other) for one, other in zip(ours, again, strict=True))
        torch.testing.assert_close(scores, ours[0], rtol=0, atol=0)

    return run


def _different_counts(folder: str) -> None:
    rank = dist.get_rank()
    with pytest.raises(ValueError, match="all must have the same number of documents, got .*6, 7"):
        ring_maxsim(_queries(rank, torch.float32)[0], _documents(rank, 6 + rank, 7, torch.float32))


def _different_kinds(folder: str) -> None:
    """What only the ranks together can see is an error on all of them, before they exchange anything else."""
    odd = dist.get_rank() == dist.get_world_size() - 1
    plain, floor = torch.ones(2, 5, DIM), torch.ones(2, dtype=torch.bool)
    for values, zero_floor, autocast, sentence in (
        (torch.ones(2, 5, DIM + 1), None, False, f"must have documents of the same d, got {DIM}, .*{DIM + 1}.$"),
        (plain.double(), None, False, "must have documents of one dtype, got torch.float32, .*torch.float64.$"),
        (plain, None, True, "must have documents of one dtype, got torch.float32, .*torch.bfloat16.$"),
        (plain, floor, False, "must give a zero_floor or none must, got False, .*True.$"),
    ):
        values, zero_floor = (values, zero_floor) if odd else (plain, None)
        documents = TokenBatch.from_padded(values)
        queries = torch.ones(1, 3, values.shape[2], dtype=values.dtype)
        with (
            torch.autocast("cpu", torch.bfloat16, enabled=autocast and odd),
            pytest.raises(ValueError, match=f"maxsim across ranks: all {sentence}"),
        ):
            ring_maxsim(queries, documents, zero_floor=zero_floor)
        if not autocast:
            with pytest.raises(ValueError, match=f"maxsim across ranks: all {sentence}"):
                gather_documents(documents, zero_floor)
        # Nothing is left on its way.
        assert ring_maxsim(torch.ones(1, 3, DIM), TokenBatch.from_padded(plain)).unique().tolist() == [3 * DIM]


def _one_in_a_ring(folder: str) -> None:
    """What the others send each other it would wait for, and so would they."""
    model = load_model(f"{folder}/modernbert")
    loss_function, batch = losses.Contrastive(model, gather_across_devices=True), _batch(model, dist.get_rank())
    pylate_fastmaxsim.enable(ring=dist.get_rank() == 0)
    with pytest.raises(ValueError, match="all must pass documents in a ring or none must, got True, False"):
        loss_function(batch)


def _second_derivatives(folder: str) -> None:
    documents = TokenBatch.from_padded(torch.randn(2, 5, DIM, requires_grad=True))
    queries = torch.randn(1, 3, DIM, requires_grad=True)
    with pytest.raises(NotImplementedError, match="ring_maxsim: second derivatives"):
        torch.autograd.grad(ring_maxsim(queries, documents).sum(), queries, create_graph=True)
    scores = maxsim(queries, gather_documents(documents)[0])
    (first,) = torch.autograd.grad(scores.square().sum(), documents.values, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        first.sum().backward()


@pytest.mark.parametrize(
    "queries, documents, options, name",
    [
        (_documents(0, 2, 7, torch.float32), _documents(0, 2, 7, torch.float32), {}, "queries"),
        (torch.ones(1, 1, DIM), _documents(0, 2, 7, torch.float32), {"zero_floor": [True, False]}, "zero_floor"),
    ],
)
def test_an_argument_of_the_wrong_type_is_named(queries, documents, options, name):
    with pytest.raises(TypeError, match=f"ring_maxsim: {name} must be a .* got (TokenBatch|list)"):
        ring_maxsim(queries, documents, **options)


class _Alive(TorchDispatchMode):
    """The most bytes that tensors made by this process held at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self.storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.storages = {key: value for key, value in self.storages.items() if not value[0].expired()}
        self.most = max(self.most, sum(size for _, size in self.storages.values()))
        return result


def _memory(folder: str) -> None:
    """No rank holds the documents of all: their vectors are most of what there is here."""
    ranks = dist.get_world_size()
    values = torch.randn(4, 500, DIM, requires_grad=True)
    documents = TokenBatch.from_padded(values, torch.ones(4, 500))
    queries = torch.randn(1, 2, DIM, requires_grad=True)
    shard = values.numel() * values.itemsize

    def shards_alive(score: Callable[[], Tensor]) -> float:
        with _Alive() as alive:
            score().sum().backward()
        return alive.most / shard

    # Two shards at a time, in the backward each with its gradient, and what is added to one of these.
    in_ring = shards_alive(lambda: ring_maxsim(queries, documents))
    assert in_ring < 5.2, in_ring
    if ranks == 4:
        gathered = shards_alive(lambda: maxsim(queries, gather_documents(documents, None)[0]))
        assert gathered > 2 * ranks, gathered


def _batch(model, rank: int, queries: int = 6):
    longest = (6, 40, 2, 20)[rank]
    texts = [sentences(queries, longest=8, seed=rank)]
    texts += [sentences(queries, longest=longest, seed=10 * column + rank) for column in (1, 2)]
    if rank == 1:
        # Nothing but tokens of the skiplist, beside those that every document has.
        texts[2] = [". !"] * queries
    return features(model, *texts)


def _losses(
    loss_class, packed: bool = False, stock_masking: bool = True, pooling: Pooling = Max(), **options
) -> Callable[[str], None]:
    """A loss in float32: in a ring as gathered and, where masking is the same, as in stock.

    With another pooling the stock loss is given it as a ``score_metric`` in plain PyTorch.
    """

    def run(folder: str) -> None:
        core = load_model(f"{folder}/modernbert", document_length=32)
        batch = _batch(core, dist.get_rank())
        loss_function = loss_class(DistributedDataParallel(core), gather_across_devices=True, **options)
        step = partial(loss_and_gradients, core, loss_function, batch)
        results = {"stock": step()} if stock_masking else {}
        metric = options.get("score_metric", PooledScores(pooling))
        if metric.pooling != Max():
            default, loss_function.score_metric = loss_function.score_metric, PlainScores(metric)
            results["plain"] = step()
            loss_function.score_metric = default
        if packed:
            encoding_attention.variable_length_attention = attend_to_own_document
        for name, in_ring in (("gathered", False), ("ring", True)):
            with (
                pylate_fastmaxsim.enabled(stock_masking=stock_masking, ring=in_ring, pooling=pooling),
                mock.patch.object(pylate_losses, "ring_maxsim", wraps=ring_maxsim) as scored,
            ):
                results[name] = step()
            assert scored.called == in_ring
        loss, gradients = results.pop("ring")
        largest = max(gradient.abs().max() for gradient in gradients.values())
        for other, (expected, others) in results.items():
            assert loss == pytest.approx(expected, rel=1e-5), other
            for name, gradient in others.items():
                assert (gradients[name] - gradient).abs().max() <= 1e-5 * largest, (other, name)

    return run


def _without_gradients(folder: str) -> None:
    core = load_model(f"{folder}/modernbert")
    batch = _batch(core, dist.get_rank())
    for loss_class in (losses.Contrastive, losses.CachedContrastive):
        loss_function = loss_class(core, gather_across_devices=True)
        with torch.no_grad(), pylate_fastmaxsim.enabled():
            gathered = loss_function(batch)
            pylate_fastmaxsim.enable(ring=True)
            in_ring = loss_function(batch)
        assert in_ring.item() == pytest.approx(gathered.item(), rel=1e-5) and not in_ring.requires_grad


CASES = {
    "operator": _operator(),
    "operator filtered": _operator(grad_filter="auto"),
    "operator with a floor": _operator(floor=True),
    "operator that keeps no winners": _operator(kept=0),
    "operator that keeps some winners": _operator(kept=600),
    "operator in chunks": _operator(at_once=2000, kept=1000),
    "operator under autocast": _operator(torch.float32, 1e-2, autocast=True),
    "operator with top-k": _operator(pooling=TopK(3), grad_filter="auto", kept=4000),
    "operator with softmax": _operator(pooling=Softmax(0.5), at_once=2000, kept=0),
    "operator with log-sum-exp": _operator(pooling=LogSumExp(0.5)),
    "different counts": _different_counts,
    "different kinds": _different_kinds,
    "one in a ring": _one_in_a_ring,
    "second derivatives": _second_derivatives,
    "memory": _memory,
    "contrastive": _losses(losses.Contrastive),
    "contrastive packed": _losses(losses.Contrastive, packed=True),
    "contrastive masking": _losses(losses.Contrastive, stock_masking=False),
    "cached": _losses(losses.CachedContrastive, mini_batch_size=2),
    "cached packed": _losses(losses.CachedContrastive, mini_batch_size=2, packed=True),
    "cached chunks": _losses(losses.CachedContrastive, mini_batch_size=3, score_mini_batch_size=2, stock_masking=False),
    "contrastive top-k": _losses(losses.Contrastive, stock_masking=False, pooling=TopK(3)),
    "cached metric": _losses(
        losses.CachedContrastive,
        mini_batch_size=2,
        stock_masking=False,
        score_metric=PooledScores(Softmax(0.1), length_normalize=True),
    ),
    "without gradients": _without_gradients,
}


@pytest.fixture(scope="module", params=[pytest.param(2, marks=pytest.mark.smoke), 4])
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[str]]:
    return run_cases(__name__, request.param, tmp_path_factory.mktemp("ring"))


@pytest.mark.process
@pytest.mark.parametrize("case", CASES)
def test_ring(outcomes, case):
    for rank, outcome in enumerate(outcomes(case)):
        assert outcome == "passed", f"rank {rank}: {outcome}"
