"""PyLate's losses on documents without padding and scores without a similarity tensor."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from inspect import unwrap as undecorated

import torch
import torch.distributed as dist
import tqdm
from pylate import scores as stock_scores
from pylate.losses import CachedContrastive, Contrastive, Distillation
from pylate.losses.cached_contrastive import RandContext
from pylate.utils import all_gather, all_gather_with_gradients, get_rank, get_world_size
from torch import Tensor, nn
from torch.nn import functional as F

from pylate_fastmaxsim.integrations import log_once, packing, switch
from pylate_fastmaxsim.integrations.documents import without_index
from pylate_fastmaxsim.integrations.patching import Patch
from pylate_fastmaxsim.integrations.wrappers import unwrap
from pylate_fastmaxsim.ops.maxsim import maxsim
from pylate_fastmaxsim.tokens import TokenBatch

Features = list[dict[str, Tensor]]


def patches() -> list[Patch]:
    """What to replace in PyLate."""
    return [
        Patch(Contrastive, "forward", contrastive),
        Patch(CachedContrastive, "forward", cached_contrastive),
        Patch(Distillation, "forward", distillation),
    ]


def _replaces(stock: Callable) -> Callable[[Callable], Callable]:
    """Decorator: stand in for the forward of a loss, and run that where the loss asks for what we do not do."""

    def decorate(fast: Callable) -> Callable:
        @wraps(stock)
        def forward(self: nn.Module, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor | None = None):
            features = list(sentence_features)
            if switch.options() is not None:
                reason = _reason_to_leave(self)
                if reason is None:
                    return fast(self, features, labels)
                log_once("The %s loss runs as PyLate has it, padded: %s.", type(self).__name__, reason)
            return stock(self, [without_index(column) for column in features], labels)

        return forward

    return decorate


def _reason_to_leave(loss: nn.Module) -> str | None:
    metric = loss.score_metric
    if isinstance(loss, Distillation):
        # Built while enabled, a loss holds the replacement of the function; both unwrap to the original.
        default = undecorated(metric) is undecorated(stock_scores.colbert_kd_scores)
    else:
        default = type(metric) is stock_scores.ColBERTScores
    if not default:
        name = getattr(metric, "__name__", type(metric).__name__)
        return f"its score_metric {name} takes padded embeddings"
    if os.environ.get("PYLATE_SCORES_BACKEND", "auto").lower() != "auto":
        return f"the environment asks for PYLATE_SCORES_BACKEND={os.environ['PYLATE_SCORES_BACKEND']}"
    if isinstance(loss, CachedContrastive):
        steps = ("embed_minibatch", "embed_minibatch_iter", "calculate_loss", "calculate_loss_and_cache_gradients")
        changed = [step for step in steps if getattr(type(loss), step) is not getattr(CachedContrastive, step)]
        if changed:
            return f"its class overrides {', '.join(changed)}"
    return None


@dataclass(frozen=True)
class _Scored:
    """Documents in the order of their columns of scores, and which of them stock's masking gives a floor of 0."""

    documents: TokenBatch
    zero_floor: Tensor | None


@_replaces(Contrastive.forward)
def contrastive(self: Contrastive, features: Features, labels: Tensor | None) -> Tensor:
    queries, documents = _encode(self.model, features)
    queries_mask = _queries_mask(self.model, features)
    scored = _scored(self, documents, features)
    if self.gather_across_devices:
        scored = _gather(scored)
    batch_size = len(queries)
    step = self.score_mini_batch_size or batch_size
    chunks = [
        _score(queries[begin : begin + step], _rows(queries_mask, begin, step), scored)
        for begin in range(0, batch_size, step)
    ]
    loss = F.cross_entropy(
        torch.cat(chunks) / self.temperature,
        _targets(batch_size, len(features) - 1, self.gather_across_devices, queries.device),
        reduction="mean" if self.size_average else "sum",
    )
    return loss * get_world_size() if self.gather_across_devices else loss


@_replaces(Distillation.forward)
def distillation(self: Distillation, features: Features, labels: Tensor) -> Tensor:
    features = features[:2]
    queries, documents = _encode(self.model, features)
    candidates = torch.arange(len(documents), device=queries.device).view(len(queries), -1)
    scored = _scored(self, documents, features)
    scores = _score(queries, _queries_mask(self.model, features), scored, candidates)
    if self.normalize_scores:
        lowest, highest = scores.min(dim=1, keepdim=True).values, scores.max(dim=1, keepdim=True).values
        scores = (scores - lowest) / (highest - lowest + 1e-8)
    return self.loss_function(F.log_softmax(scores, dim=-1), F.log_softmax(labels, dim=-1))


@_replaces(CachedContrastive.forward)
def cached_contrastive(self: CachedContrastive, features: Features, labels: Tensor | None) -> Tensor:
    """GradCache: embed without gradients, differentiate the loss by the embeddings, embed again to go on from there."""
    queries_mask = _queries_mask(self.model, features)
    plan = packing.plan_documents(self.model, features[1:], unwrap(self.model).skiplist, self.mini_batch_size)
    size = self.mini_batch_size
    query_features = without_index(features[0])
    query_calls = [
        {key: value[begin : begin + size] for key, value in query_features.items()}
        for begin in range(0, len(query_features["input_ids"]), size)
    ]
    passes = [_Pass(self.model, call) for call in query_calls + plan.calls]
    embeddings = [one.first() for one in _progress(self, passes, "Embed mini-batches")]
    queries = torch.cat(embeddings[: len(query_calls)])
    documents = plan.batch(embeddings[len(query_calls) :])
    scored = _scored(self, documents, features)
    if not torch.is_grad_enabled():
        return _loss_in_chunks(self, queries, queries_mask, scored, len(features) - 1)

    queries.requires_grad_()
    documents.values.requires_grad_()
    loss = _loss_in_chunks(self, queries, queries_mask, scored, len(features) - 1)
    gradients = [*queries.grad.split([len(call["input_ids"]) for call in query_calls])]
    sizes = [part.shape[:-1].numel() for part in embeddings[len(query_calls) :]]
    gradients += documents.values.grad.split(sizes)
    loss = loss.detach().requires_grad_()
    loss.register_hook(partial(_second_passes, passes, gradients))
    return loss


class _Pass:
    """One call of the encoder that can be made again with the same random numbers in the same precision."""

    def __init__(self, model: nn.Module, features: dict[str, Tensor]) -> None:
        self._model = model
        self._features = features

    def first(self) -> Tensor:
        """Unit token embeddings, without gradients."""
        device = self._features["input_ids"].device.type
        self._random_state = RandContext(*self._features.values())
        self._autocast = {
            "device_type": device,
            "dtype": torch.get_autocast_dtype(device),
            "enabled": torch.is_autocast_enabled(device),
        }
        with torch.no_grad():
            return self._embed()

    def again(self) -> Tensor:
        """The same with gradients."""
        # The second pass runs inside backward(), which a training loop calls outside of its autocast context.
        with self._random_state, torch.enable_grad(), torch.autocast(**self._autocast):
            return self._embed()

    def _embed(self) -> Tensor:
        return _normalize(packing.token_embeddings(self._model, self._features))


def _second_passes(passes: Sequence[_Pass], gradients: Sequence[Tensor], grad_output: Tensor) -> None:
    for one, gradient in zip(passes, gradients, strict=True):
        embeddings = one.again()
        with torch.enable_grad():
            surrogate = torch.dot(embeddings.flatten(), gradient.flatten()) * grad_output
        surrogate.backward()


def _loss_in_chunks(
    self: CachedContrastive, queries: Tensor, queries_mask: Tensor | None, scored: _Scored, columns: int
) -> Tensor:
    """The loss in chunks of queries; with gradients, their sum over queries is left in the leaves.

    As stock does: ``size_average`` divides the loss that is returned, not the gradients.
    """
    with_backward = torch.is_grad_enabled()
    if self.gather_across_devices:
        scored = _gather(scored)
    # Chunks leave their gradients at the gathered documents, so that these are sent back once and not per chunk.
    gathered = scored.documents.values
    leaf = gathered.detach().requires_grad_(with_backward)
    scored = _Scored(scored.documents.with_values(leaf), scored.zero_floor)
    targets = _targets(len(queries), columns, self.gather_across_devices, queries.device)
    step = self.score_mini_batch_size
    losses = []
    for begin in _progress(self, range(0, len(queries), step), "Preparing caches"):
        scores = _score(queries[begin : begin + step], _rows(queries_mask, begin, step), scored)
        loss = F.cross_entropy(scores / self.temperature, targets[begin : begin + step], reduction="sum")
        if self.gather_across_devices:
            loss = loss * get_world_size()
        if with_backward:
            loss.backward()
        losses.append(loss.detach())
    if with_backward:
        gathered.backward(leaf.grad)
    loss = torch.stack(losses).sum()
    return loss / len(queries) if self.size_average else loss


def _progress(self: CachedContrastive, steps: Sequence, description: str) -> Iterator:
    return iter(tqdm.tqdm(steps, desc=description, disable=not self.show_progress_bar))


def _encode(model: nn.Module, features: Features) -> tuple[Tensor, TokenBatch]:
    """Unit token embeddings of the queries, ``[B, L, d]``, and of the documents, column after column."""
    plan = packing.plan_documents(model, features[1:], unwrap(model).skiplist)
    queries = _normalize(packing.token_embeddings(model, without_index(features[0])))
    documents = packing.encode(model, plan)
    return queries, documents.with_values(_normalize(documents.values))


def _queries_mask(model: nn.Module, features: Features) -> Tensor | None:
    # With query expansion all tokens of a query are scored, also those that are not attended to.
    return None if unwrap(model).do_query_expansion else features[0]["attention_mask"]


def _normalize(embeddings: Tensor) -> Tensor:
    return F.normalize(embeddings, p=2, dim=-1)


def _scored(loss: nn.Module, documents: TokenBatch, features: Features) -> _Scored:
    """From column after column to all documents of the first query, of the second, and so on."""
    columns = features[1:]
    order = torch.arange(len(documents), device=documents.device).view(len(columns), -1).t().reshape(-1)
    zero_floor = None
    if switch.options().stock_masking:
        skiplist = unwrap(loss.model).skiplist
        masked = [~packing.counting_tokens(column, skiplist).all(dim=1) for column in columns]
        zero_floor = torch.cat(masked)[order]
    return _Scored(documents.select(order), zero_floor)


def _score(queries: Tensor, queries_mask: Tensor | None, scored: _Scored, candidates: Tensor | None = None) -> Tensor:
    batch = TokenBatch.from_padded(queries, queries_mask)
    return maxsim(
        batch,
        scored.documents,
        candidates,
        zero_floor=scored.zero_floor,
        grad_filter=switch.options().grad_filter,
    )


def _rows(mask: Tensor | None, begin: int, count: int) -> Tensor | None:
    return None if mask is None else mask[begin : begin + count]


def _targets(batch_size: int, columns: int, gathered: bool, device: torch.device) -> Tensor:
    """Column of the scores that holds the positive of each query."""
    targets = torch.arange(batch_size, device=device) * columns
    return targets + get_rank() * batch_size * columns if gathered else targets


def _gather(scored: _Scored) -> _Scored:
    """The documents of all ranks, rank after rank, with gradients. Waits for the device once."""
    documents = scored.documents
    if not (dist.is_available() and dist.is_initialized()):
        all_gather_with_gradients(documents.values)  # for the warning that PyLate gives
        return scored
    sizes = torch.tensor([len(documents.values), documents.max_length], device=documents.device)
    dist.all_reduce(sizes, dist.ReduceOp.MAX)
    rows, max_length = sizes.tolist()
    missing = rows - len(documents.values)
    values = torch.cat(tuple(all_gather_with_gradients(F.pad(documents.values, (0, 0, 0, missing)))))
    keep = torch.cat(tuple(all_gather(F.pad(documents.keep, (0, missing)))))
    zero_floor = scored.zero_floor
    if zero_floor is not None:
        zero_floor = torch.cat(tuple(all_gather(zero_floor)))
    starts = torch.cat([start + rank * rows for rank, start in enumerate(all_gather(documents.starts))])
    lengths = torch.cat(tuple(all_gather(documents.lengths)))
    return _Scored(TokenBatch(values, starts, lengths, max_length, keep), zero_floor)
