"""PyLate's losses on documents without padding and scores without a similarity tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from numbers import Integral

import torch
import torch.distributed as dist
import tqdm
from pylate import scores as stock_scores
from pylate.losses.cached_contrastive import CachedContrastive
from pylate.losses.contrastive import Contrastive
from pylate.losses.distillation import Distillation
from pylate.utils import ColBERTCollator, all_gather_with_gradients, get_rank, get_world_size
from sentence_transformers import SentenceTransformerTrainer
from torch import Tensor, nn
from torch.nn import functional as F

from pylate_fastmaxsim._winners import queries_at_once
from pylate_fastmaxsim.integrations.encoding import encode as encoding_encode
from pylate_fastmaxsim.integrations.encoding.gradcache import first_pass, losses_of_chunks, with_second_passes
from pylate_fastmaxsim.integrations.encoding.masks import (
    MasksChanged,
    agree_on_mask_changes,
    changes_masks,
    with_copied_masks,
)
from pylate_fastmaxsim.integrations.encoding.plans import live_tokens
from pylate_fastmaxsim.integrations.encoding.token_counts import counting_tokens_of_batches, without_total
from pylate_fastmaxsim.integrations.encoding.views import current as current_views
from pylate_fastmaxsim.integrations.encoding.views import sum_over_views
from pylate_fastmaxsim.integrations.log import log_once
from pylate_fastmaxsim.integrations.models.context import setting
from pylate_fastmaxsim.integrations.models.wrappers import StandIn, group_in_step, wrapper_attribute
from pylate_fastmaxsim.integrations.options import Options, current_options
from pylate_fastmaxsim.integrations.patching.fallback import asked_backend
from pylate_fastmaxsim.integrations.patching.known_sources import not_known, unknown_part
from pylate_fastmaxsim.integrations.patching.patches import Patch
from pylate_fastmaxsim.integrations.pylate.fused_head import unit_embeddings
from pylate_fastmaxsim.integrations.pylate.scores import in_stock_loss
from pylate_fastmaxsim.ops.gathered import DtypesDiffer, gather_documents
from pylate_fastmaxsim.ops.maxsim import maxsim
from pylate_fastmaxsim.ops.pooled import state_bytes
from pylate_fastmaxsim.ops.score_metric import PooledScores
from pylate_fastmaxsim.ops.xtr import xtr_scores
from pylate_fastmaxsim.pooling import Max, check_pooling
from pylate_fastmaxsim.tokens import TokenBatch

Features = list[dict[str, Tensor]]

NOT_ACCELERATED = "%s is not accelerated (running PyLate's padded implementation): %s."


_COLLATOR_AND_TRAINER = counting_tokens_of_batches(ColBERTCollator, SentenceTransformerTrainer)


def patches() -> list[Patch]:
    """Replacements in PyLate, and in the trainer of Sentence Transformers."""
    return [
        *_COLLATOR_AND_TRAINER,
        Patch(Contrastive, "forward", contrastive),
        Patch(CachedContrastive, "forward", cached_contrastive),
        Patch(Distillation, "forward", distillation),
    ]


def _replaces(stock: Callable) -> Callable[[Callable], Callable]:
    """Decorator: replace the forward of a loss, and run PyLate's own where the loss cannot be accelerated.

    The options are those in force when the loss is called: another thread may change them before it ends.
    """

    def decorate(fast: Callable) -> Callable:
        @wraps(stock)
        def forward(self: nn.Module, sentence_features: Iterable[dict[str, Tensor]], *labels, **named_labels):
            features = list(sentence_features)
            # A stand-in answers for the columns as stock gives them to a model.
            options = None if isinstance(self.model, StandIn) else current_options()
            if options is not None:
                reason = _reason_to_leave(self, stock) or _reason_in_model(self)
                if reason is None:
                    if len(features) < 2:
                        raise ValueError(
                            f"{type(self).__name__}: sentence_features must hold the column of the queries and at least "
                            f"one of documents, got {len(features)} in all."
                        )
                    # CachedContrastive does not raise it, nor does any loss after the first batch.
                    first = not isinstance(self, CachedContrastive) and changes_masks(self) is None
                    before = with_copied_masks(features) if first else features
                    try:
                        return fast(self, options, features, *labels, **named_labels)
                    except MasksChanged:
                        features, reason = before, _reason_in_model(self)
                name = type(self).__name__
                log_once(NOT_ACCELERATED, name, reason, about=self)
            features = [without_total(column) for column in features]
            with setting(in_stock_loss, True):
                if (views := current_views.get()) is not None and not isinstance(self.model, StandIn):
                    return views.of_stock(partial(stock, self), features, *labels, **named_labels)
                return stock(self, features, *labels, **named_labels)

        forward.takes_views = True
        return forward

    return decorate


def _reason_to_leave(loss: nn.Module, stock: Callable) -> str | None:
    # What the loss itself runs, with GradCache also its steps on this very instance.
    if (part := unknown_part(stock, loss)) is not None:
        return not_known(part)
    metric = loss.score_metric
    if _passing_tokens(loss) is not None:
        return None
    if type(metric) is PooledScores:
        if metric.own_documents != isinstance(loss, Distillation):
            raise ValueError(
                f"{type(loss).__name__}: its score_metric must have own_documents={not metric.own_documents}, got "
                f"{metric!r}."
            )
        check_pooling(type(loss).__name__, metric.pooling)
        return None
    if isinstance(loss, Distillation):
        is_default, scoring = metric is stock_scores.colbert_kd_scores, metric
    else:
        is_default, scoring = type(metric) is stock_scores.ColBERTScores, type(metric).__call__
    if not is_default:
        name = getattr(metric, "__name__", type(metric).__name__)
        return f"its score_metric {name} is not PyLate's own and takes padded embeddings"
    if (part := unknown_part(scoring)) is not None:
        return not_known(part)
    if (backend := asked_backend("PYLATE_SCORES_BACKEND")) is not None:
        return f"the environment asks for PYLATE_SCORES_BACKEND={backend}"
    return None


def _passing_tokens(loss: nn.Module) -> int | None:
    """Number of document tokens that pass for each query token with PyLate's XTR scores; None with others."""
    own = stock_scores.XTRKDScores if isinstance(loss, Distillation) else stock_scores.XTRScores
    metric = loss.score_metric
    return metric.k if type(metric) is own and unknown_part(own.__call__, metric) is None else None


def _reason_in_model(loss: nn.Module) -> str | None:
    # Stock's CachedContrastive looks at masks before it encodes, as all losses do here.
    if isinstance(loss, CachedContrastive) or not changes_masks(loss):
        return None
    return "the model changes input_ids or attention_mask, by a module of its own or a hook"


@dataclass(frozen=True)
class _Metric:
    """How a loss scores: with XTR scores ``k`` document tokens pass for each query token; without a ``pooled`` one MaxSim."""

    k: int | None
    pooled: PooledScores | None
    has_floor: bool

    def scores(
        self,
        queries: Tensor,
        queries_mask: Tensor | None,
        documents: TokenBatch,
        zero_floor: Tensor | None,
        candidates: Tensor | None = None,
    ) -> Tensor:
        # Documents may have become wider for those of other ranks; never are queries made narrower.
        queries = queries.to(torch.promote_types(queries.dtype, documents.values.dtype))
        batch = TokenBatch.from_padded(queries, queries_mask)
        if self.k is not None:
            return xtr_scores(batch, documents, self.k, candidates, zero_floor=zero_floor).float()  # as in PyLate
        if self.pooled is None:
            return maxsim(batch, documents, candidates, zero_floor=zero_floor)
        return self.pooled.of_batches(batch, documents, candidates)


def _metric(loss: nn.Module, options: Options) -> _Metric:
    k = _passing_tokens(loss)
    if k is not None and not isinstance(options.pooling, Max):
        log_once("pooling=%s has no effect with XTR scores: they choose tokens in a way of their own.", options.pooling)
    pooled = loss.score_metric if type(loss.score_metric) is PooledScores else None
    if pooled is None and not isinstance(options.pooling, Max):
        pooled = PooledScores(options.pooling)
    # A masked token never passes in XTR scores, and a token that does not counts as 0 there.
    return _Metric(k, pooled, has_floor=k is not None or (options.stock_masking and pooled is None))


@_replaces(Contrastive.forward)
def contrastive(self: Contrastive, options: Options, features: Features, labels: Tensor | None = None) -> Tensor:
    queries, documents = _encode(self, features)
    queries_mask, metric = scored_tokens(self.model, features), _metric(self, options)
    targets = _targets(len(queries), len(features) - 1, self.gather_across_devices, queries.device)

    def loss_of(queries: Tensor, documents: TokenBatch, zero_floor: Tensor | None) -> Tensor:
        if self.gather_across_devices:
            documents, zero_floor = _gather(documents, zero_floor)
        # All at once, whatever score_mini_batch_size says: it bounds the memory of similarities, and there are none.
        scores = metric.scores(queries, queries_mask, documents, zero_floor)
        reduction = "mean" if self.size_average else "sum"
        loss = F.cross_entropy(scores / self.temperature, targets, reduction=reduction)
        return loss * get_world_size() if self.gather_across_devices else loss

    return sum_over_views(loss_of, queries, *_by_query(self, metric, documents, features))


@_replaces(Distillation.forward)
def distillation(self: Distillation, options: Options, features: Features, labels: Tensor) -> Tensor:
    features = features[:2]
    queries, documents = _encode(self, features)
    candidates = torch.arange(len(documents), device=queries.device).view(len(queries), -1)
    queries_mask, metric = scored_tokens(self.model, features), _metric(self, options)

    def loss_of(queries: Tensor, documents: TokenBatch, zero_floor: Tensor | None) -> Tensor:
        scores = metric.scores(queries, queries_mask, documents, zero_floor, candidates)
        if self.normalize_scores:
            lowest, highest = scores.min(dim=1, keepdim=True).values, scores.max(dim=1, keepdim=True).values
            scores = (scores - lowest) / (highest - lowest + 1e-8)
        return self.loss_function(F.log_softmax(scores, dim=-1), F.log_softmax(labels, dim=-1))

    return sum_over_views(loss_of, queries, *_by_query(self, metric, documents, features))


@_replaces(CachedContrastive.forward)
def cached_contrastive(
    self: CachedContrastive, options: Options, features: Features, labels: Tensor | None = None
) -> Tensor:
    """GradCache: embed without gradients, differentiate the loss by the embeddings, embed again to go on from there."""
    if not isinstance(self.mini_batch_size, Integral) or self.mini_batch_size < 1:
        raise ValueError(
            f"CachedContrastive: mini_batch_size must be an integer of at least 1, got {self.mini_batch_size!r}."
        )
    queries_mask, metric = scored_tokens(self.model, features), _metric(self, options)
    progress = partial(_progress, self, description="Embed mini-batches")
    batch = CachedBatch(self.model, features, mini_batch_size=self.mini_batch_size, progress=progress)
    targets = _targets(len(batch.queries), len(features) - 1, self.gather_across_devices, batch.queries.device)

    def loss_of(queries: Tensor, documents: TokenBatch, zero_floor: Tensor | None) -> Tensor:
        if self.gather_across_devices:
            documents, zero_floor = _gather(documents, zero_floor)
        pooling = Max() if metric.pooled is None else metric.pooled.pooling
        kept = state_bytes(pooling, documents.max_length, documents.values.dtype)
        # All where memory allows, and never fewer than the loss asks for.
        step = max(self.score_mini_batch_size, queries_at_once(queries.shape[1], len(documents), kept))
        begins = _progress(self, range(0, len(queries), step), "Preparing caches")

        def loss_of_chunk(chunk: slice, values: Tensor) -> Tensor:
            mask = None if queries_mask is None else queries_mask[chunk]
            scores = metric.scores(queries[chunk], mask, documents.with_values(values), zero_floor)
            loss = F.cross_entropy(scores / self.temperature, targets[chunk], reduction="sum")
            return loss * get_world_size() if self.gather_across_devices else loss

        chunks = (slice(begin, begin + step) for begin in begins)
        loss = torch.stack(losses_of_chunks(documents.values, len(queries), chunks, loss_of_chunk)).sum()
        # As in PyLate, only of the loss that is reported: gradients are those of the sum over the queries.
        return loss / len(queries) if self.size_average else loss

    documents_and_floor = _by_query(self, metric, batch.documents, features)
    loss = sum_over_views(loss_of, batch.queries, *documents_and_floor, of_leaves=True)
    return batch.with_second_passes(loss) if torch.is_grad_enabled() else loss


class CachedBatch:
    """Unit token embeddings of a batch, made without gradients: ``queries`` ``[Nq, Lq, d]``, ``documents`` a TokenBatch.

    While gradients are computed, ``queries`` and ``documents.values`` are leaves: differentiate the loss by them, and
    then return it from :meth:`with_second_passes`.

    ``features`` are the tokenized columns, the queries and then the documents. Give ``mini_batch_size`` or
    ``mini_batch_tokens``, as to ``plan_documents``. ``progress`` goes through the calls of the first pass.
    """

    def __init__(
        self,
        model: nn.Module,
        features: Sequence[dict[str, Tensor]],
        *,
        mini_batch_size: int | None = None,
        mini_batch_tokens: int | None = None,
        progress: Callable[[Features], Iterable[dict[str, Tensor]]] = iter,
    ) -> None:
        size = {"mini_batch_size": mini_batch_size, "mini_batch_tokens": mini_batch_tokens}
        plan = encoding_encode.plan_documents(model, features[1:], wrapper_attribute(model, "skiplist"), **size)
        query_calls = encoding_encode.query_calls(model, features[0], plan, **size)
        self._model, self._queries = model, len(query_calls)
        calls = progress(query_calls + plan.calls)
        made = [first_pass(partial(unit_embeddings, model, call), call) for call in calls]
        embeddings, self._second_passes = zip(*made, strict=True)
        self._shapes = [part.shape for part in embeddings]
        self.queries = torch.cat(embeddings[: self._queries])
        self.documents = plan.batch(embeddings[self._queries :])
        del embeddings, made  # of large batches the most memory, now held once more
        if torch.is_grad_enabled():
            self.queries.requires_grad_()
            self.documents.values.requires_grad_()

    def with_second_passes(self, loss: Tensor) -> Tensor:
        """The loss, whose ``backward()`` embeds the batch again and goes on from the gradients of the leaves."""
        of_queries, of_documents = self._shapes[: self._queries], self._shapes[self._queries :]
        gradients = [*self.queries.grad.split([shape[0] for shape in of_queries])]
        gradients += self.documents.values.grad.split([shape[:-1].numel() for shape in of_documents])
        return with_second_passes(loss, self._model, self._second_passes, gradients)


def _progress(self: CachedContrastive, steps: Sequence, description: str) -> Iterator:
    return iter(tqdm.tqdm(steps, desc=description, disable=not self.show_progress_bar))


def _encode(loss: nn.Module, features: Features) -> tuple[Tensor, TokenBatch]:
    """Unit token embeddings of the queries, ``[B, L, d]``, and of the documents, column after column."""
    changed = False

    def embed(model: nn.Module, call: dict[str, Tensor]) -> Tensor:
        nonlocal changed
        try:
            return unit_embeddings(model, call, masks_stay=True)
        except MasksChanged as change:
            # Perhaps on this rank only: it makes all calls that the others make, which may wait for it in each.
            changed = True
            ids = call["input_ids"]
            return torch.zeros(*ids.shape, change.dim, device=ids.device)

    encoded = encoding_encode.encode_batch(loss.model, features, wrapper_attribute(loss.model, "skiplist"), embed)
    if changed or changes_masks(loss) is None:
        gathers = getattr(loss, "gather_across_devices", False) and dist.is_available() and dist.is_initialized()
        group = dist.group.WORLD if gathers else group_in_step(loss.model)
        agree_on_mask_changes(loss, changed, features[0]["input_ids"].device, group)
    return encoded


def scored_tokens(model: nn.Module, features: Features) -> Tensor | None:
    """Mask of the query tokens that are scored, ``[B, L]``, bool; None: all."""
    # With query expansion all tokens of a query are scored, also those that are not attended to.
    # Else any number but 0 is a token, as in PyLate.
    return None if wrapper_attribute(model, "do_query_expansion") else features[0]["attention_mask"].bool()


def _by_query(
    loss: nn.Module, metric: _Metric, documents: TokenBatch, features: Features
) -> tuple[TokenBatch, Tensor | None]:
    """From column after column to all documents of the first query, of the second, and so on, and their floors of 0."""
    columns = features[1:]
    rows = [len(column["input_ids"]) for column in columns]
    if len(set(rows)) > 1:
        raise ValueError(
            f"{type(loss).__name__}: all document columns must have as many texts as the first, got "
            f"{', '.join(map(str, rows))}; a list of negatives is one column for each place in the list."
        )
    order = torch.arange(len(documents), device=documents.device).view(len(columns), -1).t().reshape(-1)
    return documents.select(order), masked_documents(loss.model, columns)[order] if metric.has_floor else None


def masked_documents(model: nn.Module, columns: Features) -> Tensor:
    """Which documents of all columns have a token that is not scored, bool."""
    skiplist = wrapper_attribute(model, "skiplist")
    return torch.cat([~live_tokens(column, skiplist).all(dim=1) for column in columns])


def _targets(batch_size: int, columns: int, gathered: bool, device: torch.device) -> Tensor:
    """Column of the scores that holds the positive of each query."""
    targets = torch.arange(batch_size, device=device) * columns
    return targets + get_rank() * batch_size * columns if gathered else targets


def _gather(documents: TokenBatch, zero_floor: Tensor | None) -> tuple[TokenBatch, Tensor | None]:
    """The documents of all ranks, rank after rank, with gradients, and their floors. Waits for the other ranks once.

    The head may be fused on some of them only, as where one has hooks, and float32 is then what the others have.
    """
    if not (dist.is_available() and dist.is_initialized()):
        all_gather_with_gradients(documents.values)  # for the warning that PyLate gives
        return documents, zero_floor
    try:
        return gather_documents(documents, zero_floor)
    except DtypesDiffer as error:
        if documents.values.dtype != error.widest:
            log_once("Documents are scored in %s, the dtype that they have in another process.", error.widest)
        return gather_documents(documents.with_values(documents.values.to(error.widest)), zero_floor)
