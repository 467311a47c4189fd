"""Encode documents without padding, on any encoder of transformers, and only where that gives what padding gives."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache, partial
from typing import TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DataParallel

from pylate_fastmaxsim.integrations import attention, compilation, log_once, switch
from pylate_fastmaxsim.integrations.attention import PackingUnsupported, is_packed_mask
from pylate_fastmaxsim.integrations.documents import (
    Documents,
    EncodingPlan,
    column_has_gaps,
    grouped_plan,
    packed_plan,
    padded_plan,
    without_index,
)
from pylate_fastmaxsim.integrations.joint import joint_call
from pylate_fastmaxsim.integrations.uninspected_masks import uninspected
from pylate_fastmaxsim.integrations.wrappers import is_compiled, layers_of_wrapping, runs_in_step, unwrap
from pylate_fastmaxsim.tokens import TokenBatch

# What makes token embeddings [N, L, d] of one call of the model.
Embed = Callable[[nn.Module, dict[str, Tensor]], Tensor]

# Of what this rank found, what all ranks act on.
Agree = Callable[[bool], bool]

Decision = TypeVar("Decision")

# Distance between unit token vectors that may differ by rounding only.
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.05}
_TOLERANCE_TF32 = 1e-2

# What the plans without padding carry over; an encoder that is given more than this is left alone.
_UNDERSTOOD = {"input_ids", "attention_mask", "token_type_ids"}

_modes: WeakKeyDictionary[nn.Module, dict[Hashable, str]] = WeakKeyDictionary()

# Whether a packed encoder takes the queries with the documents.
_joint: WeakKeyDictionary[nn.Module, dict[Hashable, bool]] = WeakKeyDictionary()

# Of each encoder: the position of its padding token, where its positions begin behind that, and whether it has token types.
_counting: WeakKeyDictionary[nn.Module, tuple[int | None, bool]] = WeakKeyDictionary()


def encode_documents(
    model: nn.Module, document_features: Sequence[dict[str, Tensor]], skiplist: list[int]
) -> TokenBatch:
    """Encode the documents of all columns of a batch.

    How is decided on the first batch of an encoder and logged where it is not the fastest way:

    ``packed``
        all attended tokens in one row, attention inside each document. Nothing waits for the device
        if the patched collator made the batch.
    ``grouped``
        documents of similar length together, cut to the longest of the group. Where the encoder
        cannot be packed, and on a CPU. On a CUDA device this waits for it once, for the lengths.
    ``padded``
        as stock PyLate does.

    Parameters
    ----------
    model
        A ``pylate.models.ColBERT``, possibly inside DistributedDataParallel or ``torch.compile``.
    document_features
        For each document column, what the tokenizer (and the collator) made of it:
        ``input_ids`` and ``attention_mask``, ``[N, L]``.
    skiplist
        Ids of the tokens that are not scored.

    Returns
    -------
    TokenBatch
        Token embeddings as the model gives them (not normalized), column after column.
    """
    return encode(model, plan_documents(model, document_features, skiplist))


def encode(model: nn.Module, plan: EncodingPlan) -> TokenBatch:
    """Token embeddings of the documents of a plan, as the model gives them."""
    return plan.batch([token_embeddings(model, call) for call in plan.calls])


def encode_batch(
    model: nn.Module, features: Sequence[dict[str, Tensor]], skiplist: list[int], embed: Embed
) -> tuple[Tensor, TokenBatch]:
    """Encode the queries and the documents of a batch, in one call where the documents are packed.

    Small batches are bound by the host, which launches everything once for each call and layer. Where a packed encoder
    does not give queries the same embeddings beside documents, they have a call of their own, as in stock PyLate.

    Parameters
    ----------
    model
        A ``pylate.models.ColBERT``, possibly wrapped.
    features
        The tokenized columns: the queries, and then the documents as in :func:`encode_documents`.
    skiplist
        Ids of the tokens of documents that are not scored.
    embed
        Makes token embeddings of one call of the model.

    Returns
    -------
    tuple of Tensor and TokenBatch
        Token embeddings of the queries, ``[Nq, Lq, d]``, and of the documents, column after column.
    """
    queries, columns = features[0], features[1:]
    plan = plan_documents(model, columns, skiplist)
    if not _joins(model, queries, columns, plan):
        apart = embed(model, without_index(queries))
        return apart, plan.batch([embed(model, call) for call in plan.calls])
    core = unwrap(model)
    call = _behind_documents(core, plan.calls[0], queries)
    if is_compiled(model):
        compilation.mark_varying(call)
    rows = embed(model, call).flatten(0, -2)
    documents, rows = rows.tensor_split([plan.calls[0]["input_ids"].shape[1]])
    return rows.view(*queries["input_ids"].shape, -1), plan.batch([documents])


def plan_documents(
    model: nn.Module,
    document_features: Sequence[dict[str, Tensor]],
    skiplist: list[int],
    mini_batch_size: int | None = None,
) -> EncodingPlan:
    """The encoder calls of :func:`encode_documents`, for whoever makes them one at a time.

    Plan before the queries of the batch are encoded: the encoder is compiled here if that is asked for, and
    gradient checkpointing must find it in backward as it was in forward.

    With ``mini_batch_size`` no call holds more tokens than that many padded documents, and all
    ranks of a distributed run make equally many; to divide waits for the device.
    """
    skipped = partial(_skipped, skiplist=tuple(skiplist))
    options = switch.options()
    mode = "padded"
    if options is None or options.padding_free:
        mode = _mode(model, document_features)
    if options is not None and options.compile:
        compilation.compile_layers(model)
    if mode == "padded":
        return padded_plan(document_features, skipped, mini_batch_size)
    documents = Documents.from_columns(document_features)
    if mode == "packed" and documents.gaps:
        mode = _mode_with_gaps(model)
    budget = None if mini_batch_size is None else mini_batch_size * documents.max_length
    agree = partial(_most_of_all_ranks, device=documents.input_ids.device) if runs_in_step(model) else int
    if mode == "grouped":
        plan = grouped_plan(documents, skipped, budget, agree)
    else:
        plan = packed_plan(*_positioned(unwrap(model), documents), skipped, budget, agree)
    if is_compiled(model):
        for call in plan.calls:
            compilation.mark_varying(call)
    return plan


def query_calls(
    model: nn.Module, features: dict[str, Tensor], plan: EncodingPlan, mini_batch_size: int
) -> list[dict[str, Tensor]]:
    """The encoder calls of the queries beside those of the documents, with the queries as they are.

    Queries are short: at ``mini_batch_size`` of them a GPU would wait for the host. So a call takes more where it still
    holds no more tokens than the largest call of the documents. All ranks of a distributed run make equally many.
    """
    count, length = features["input_ids"].shape
    tokens = max(call["input_ids"].numel() for call in plan.calls)
    calls = -(-count // max(mini_batch_size, tokens // length))
    if runs_in_step(model):
        calls = _most_of_all_ranks(calls, features["input_ids"].device)
    parts = {key: value.tensor_split(calls) for key, value in without_index(features).items()}
    queries = [dict(zip(parts, part, strict=True)) for part in zip(*parts.values(), strict=True)]
    if is_compiled(model):
        for call in queries:
            compilation.mark_varying(call)
    return queries


def token_embeddings(model: nn.Module, features: dict[str, Tensor]) -> Tensor:
    """Token embeddings ``[N, L, d]`` of one call of the model, which leaves the features as they are."""
    with uninspected():
        return model(dict(features))["token_embeddings"]


def counting_tokens(features: dict[str, Tensor], skiplist: list[int]) -> Tensor:
    """Which tokens of padded documents are scored, ``[N, L]``, bool: attended to and not in the skiplist."""
    return features["attention_mask"].bool() & ~_skipped(features["input_ids"], tuple(skiplist))


def release() -> None:
    """Put the encoders back that were prepared for packing or compiled, and forget what was decided about them."""
    attention.release()
    compilation.release()
    _modes.clear()
    _joint.clear()


@lru_cache(maxsize=16)
def _token_ids(ids: tuple[int, ...], device: torch.device) -> Tensor:
    # Kept on the device: to copy it there in every step would wait for the device.
    return torch.tensor(ids, dtype=torch.long, device=device)


def _skipped(input_ids: Tensor, skiplist: tuple[int, ...]) -> Tensor:
    # Not torch.isin, which for some sizes sorts and waits for the device.
    return (input_ids.unsqueeze(-1) == _token_ids(skiplist, input_ids.device)).any(dim=-1)


def _most_of_all_ranks(count: int, device: torch.device) -> int:
    most = torch.tensor(count, device=device)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return int(most)


def _on_all_ranks(here: bool, device: torch.device) -> bool:
    return not _most_of_all_ranks(int(not here), device)


def _mode(model: nn.Module, columns: Sequence[dict[str, Tensor]]) -> str:
    """How to encode with this model."""
    return _decided(_modes, model, columns, partial(_fastest_mode, model, columns))


def _decided(
    decisions: WeakKeyDictionary[nn.Module, dict[Hashable, Decision]],
    model: nn.Module,
    columns: Sequence[dict[str, Tensor]],
    decide: Callable[[Agree], Decision],
) -> Decision:
    """What ``decide`` finds when a model is first met in a situation."""
    core = unwrap(model)
    device = columns[0]["input_ids"].device
    situation = (
        # The ranks of a distributed run decide together, also after one of them has used the model alone.
        *(type(layer) for layer in layers_of_wrapping(model)),
        core.training,
        device.type,
        torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type),
        # accelerate replaces this attribute to switch mixed precision on.
        id(vars(core).get("forward")),
        # Much wider batches may have longer documents than were looked at; no rank may decide without the others.
        0 if runs_in_step(model) else max(column["input_ids"].shape[1] for column in columns).bit_length(),
    )
    decided = decisions.setdefault(core, {})
    if situation not in decided:
        # A few calls of odd shapes, not worth compiling for.
        with torch.compiler.set_stance("force_eager"):
            decided[situation] = decide(partial(_on_all_ranks, device=device) if runs_in_step(model) else bool)
    return decided[situation]


def _mode_with_gaps(model: nn.Module) -> str:
    """How to encode documents whose attention masks have gaps, with a model that is packed otherwise."""
    if runs_in_step(model):
        raise ValueError(
            "A document of this batch has a gap in its attention_mask. It cannot be packed, and all processes must "
            "encode alike: train with enable(padding_free=False), or without gaps."
        )
    return "grouped"


def _fastest_mode(model: nn.Module, columns: Sequence[dict[str, Tensor]], agree: Agree) -> str:
    """The first mode that works, on all ranks.

    They agree on each trial before the next: to run a sharded model alone would wait for the others for ever.
    """
    works = partial(_works, agree)
    core = unwrap(model)
    padded = "Documents are encoded with padding, as stock PyLate does: %s."
    if not works(_reason_to_leave(model, columns), padded):
        return "padded"
    pair = _shortest_and_longest(core, Documents.from_columns(columns))
    if works(
        _reason_not_to(lambda: _verify(core, pair, _packed(core, pair))),
        "Documents are not packed but encoded in groups of similar length: %s.",
        # On a CPU this is the rule.
        logging.INFO if pair.input_ids.device.type == "cpu" else logging.WARNING,
    ):
        return "packed"
    grouped = grouped_plan(pair, _nothing_skipped)
    return "grouped" if works(_reason_not_to(lambda: _verify(core, pair, grouped)), padded) else "padded"


def _works(agree: Agree, reason_not_to: str | None, message: str, level: int = logging.WARNING) -> bool:
    """Whether there is no reason on any rank; else a line of log."""
    everywhere = agree(reason_not_to is None)
    if not everywhere:
        log_once(message, reason_not_to or "another process of this run cannot do without", level=level)
    return everywhere


def _joins(
    model: nn.Module, queries: dict[str, Tensor], columns: Sequence[dict[str, Tensor]], plan: EncodingPlan
) -> bool:
    """Whether the queries go into the call of the documents."""
    if not is_packed_mask(plan.calls[0]["attention_mask"]):
        return False
    joins = _decided(_joint, model, columns, partial(_can_join, model, queries, columns))
    reason = _reason_not_to_join(unwrap(model), queries) if joins else None
    if reason is not None and runs_in_step(model):
        raise ValueError(f"All processes must encode alike, and queries were encoded with documents before: {reason}.")
    return joins and reason is None


def _can_join(model: nn.Module, queries: dict[str, Tensor], columns: Sequence[dict[str, Tensor]], agree: Agree) -> bool:
    core = unwrap(model)
    message = "Queries have a call of the encoder to themselves: %s."
    if not _works(agree, _reason_not_to_join(core, queries), message, logging.INFO):
        return False
    pair = _shortest_and_longest(core, Documents.from_columns(columns))
    return _works(agree, _reason_not_to(lambda: _verify_joint(core, pair, queries)), message, logging.INFO)


def _reason_not_to_join(core: nn.Module, queries: dict[str, Tensor]) -> str | None:
    length = queries["input_ids"].shape[1]
    if length > core.query_length:
        return f"they have {length} tokens, more than the model's query_length of {core.query_length}"
    if column_has_gaps(queries):
        return "one has a gap in its attention_mask"
    unknown = core._first_module().model_forward_params.intersection(queries) - _UNDERSTOOD
    return f"the encoder is given {', '.join(sorted(unknown))}" if unknown else None


def _behind_documents(core: nn.Module, call: dict[str, Tensor], queries: dict[str, Tensor]) -> dict[str, Tensor]:
    return joint_call(call, queries, _positions(core, queries["input_ids"]), core.query_length)


def _packed(core: nn.Module, pair: Documents) -> EncodingPlan:
    _prepare(core)
    return packed_plan(*_positioned(core, pair), _nothing_skipped)


def _reason_not_to(verify: Callable[[], None]) -> str | None:
    """Why something cannot be encoded as it was tried; None if it can."""
    try:
        verify()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever somebody's encoder raises at something it does not know
        return _said(error)
    return None


def _shortest_and_longest(core: nn.Module, documents: Documents) -> Documents:
    """The shortest document of a batch, and the longest that fits it, made of tokens of the batch.

    What an encoder does not pass on, as a window of its attention, may show in long documents only, and the first batch
    need not have any.
    """
    shortest = int(documents.cu_seqlens.diff().argmin())
    rows = {
        "input_ids": documents.input_ids[shortest : shortest + 1],
        "attention_mask": documents.attention_mask[shortest : shortest + 1],
    }
    if documents.token_type_ids is not None:
        rows["token_type_ids"] = documents.token_type_ids[shortest : shortest + 1]
    tokens = documents.input_ids.reshape(-1)[documents.token_index]
    if len(tokens):
        table = _position_table(_encoder(core))
        longest = documents.max_length if table is None else min(documents.max_length, _last_position(table))
        tokens = tokens.repeat(-(-longest // len(tokens)))[:longest]
        behind = (0, documents.max_length - longest)
        long = {
            "input_ids": F.pad(tokens, behind, value=0 if table is None else table.padding_idx),
            "attention_mask": F.pad(torch.ones_like(tokens), behind),
            "token_type_ids": torch.zeros_like(documents.input_ids[0]),
        }
        rows = {key: torch.cat([row, long[key].unsqueeze(0)]) for key, row in rows.items()}
    return Documents.from_columns([rows])


def _reason_to_leave(model: nn.Module, columns: Sequence[dict[str, Tensor]]) -> str | None:
    core = unwrap(model)
    if any(isinstance(layer, DataParallel) for layer in layers_of_wrapping(model)):
        return "DataParallel splits a batch by rows; start the script with accelerate launch or torchrun"
    try:
        encoder_inputs = core._first_module().model_forward_params
    except AttributeError:
        return f"{type(core).__name__} does not begin with a Transformer of Sentence Transformers"
    unknown = encoder_inputs.intersection(*columns) - _UNDERSTOOD
    if unknown:
        return f"the encoder is given {', '.join(sorted(unknown))}"
    if getattr(core.tokenizer, "padding_side", "right") != "right":
        return "the tokenizer pads on the left"
    return None


def _prepare(core: nn.Module) -> None:
    transformer = core._first_module()
    if "position_ids" not in transformer.model_forward_params:
        raise PackingUnsupported(f"{type(_encoder(core)).__name__} takes no position_ids")
    attention.accept_packed_masks(transformer.auto_model.config._attn_implementation)


def _encoder(core: nn.Module) -> nn.Module:
    """The model of transformers, inside PEFT where that is used."""
    encoder = core._first_module().auto_model
    return encoder.get_base_model() if hasattr(encoder, "get_base_model") else encoder


def _positioned(core: nn.Module, documents: Documents) -> tuple[Documents, Tensor]:
    """Documents with all that the encoder would otherwise make up from the shape of its input, and their positions."""
    positions = _positions(core, documents.input_ids)
    if _counting[_encoder(core)][1] and documents.token_type_ids is None:
        documents = replace(documents, token_type_ids=torch.zeros_like(documents.input_ids))
    return documents, positions


def _positions(core: nn.Module, input_ids: Tensor) -> Tensor:
    """Position of each token of padded texts in the encoder's own counting, ``[N, L]``."""
    encoder = _encoder(core)
    if encoder not in _counting:
        takes_types = "token_type_ids" in inspect.signature(encoder.forward).parameters
        table = _position_table(encoder)
        _counting[encoder] = (None if table is None else table.padding_idx, takes_types)
    padding, _ = _counting[encoder]
    if padding is None:
        return torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
    # RoBERTa counts from behind the position of its padding token, and only what is not that token.
    counted = input_ids != padding
    return counted.cumsum(dim=1) * counted + padding


def _position_table(encoder: nn.Module) -> nn.Embedding | None:
    """Learned positions that are counted from behind that of the padding token, as RoBERTa's are."""
    for module in encoder.modules():
        table = getattr(module, "position_embeddings", None)
        if isinstance(table, nn.Embedding) and table.padding_idx is not None:
            return table
    return None


def _last_position(table: nn.Embedding) -> int:
    """How many tokens have a position."""
    return table.num_embeddings - table.padding_idx - 1


def _verify(core: nn.Module, documents: Documents, plan: EncodingPlan) -> None:
    """Raise PackingUnsupported where a plan gives other token embeddings than padding does."""
    padded = {"input_ids": documents.input_ids, "attention_mask": documents.attention_mask}
    if documents.token_type_ids is not None:
        padded["token_type_ids"] = documents.token_type_ids
    with _evaluating(core), _recorded_dtype(core) as dtypes:
        expected = token_embeddings(core, padded).flatten(0, 1)[documents.token_index]
        batch = encode(core, plan)
    _try_dropout(core, plan.calls)
    # After all calls, so that every rank makes as many, whatever it finds.
    offsets = torch.arange(plan.max_length, device=batch.device)
    rows = (batch.starts[:, None] + offsets)[offsets < batch.lengths[:, None]]
    _compare(core, batch.values[rows[batch.keep[rows]]], expected, dtypes, "without padding than with it")


def _verify_joint(core: nn.Module, documents: Documents, queries: dict[str, Tensor]) -> None:
    """Raise PackingUnsupported where queries behind documents get other token embeddings than apart from them."""
    lengths = queries["attention_mask"].sum(dim=1)
    # The longest query and the shortest, which has to have a token that is not attended to.
    rows = torch.stack([lengths.argmax(), lengths.argmin()])
    queries = {key: value[rows].clone() for key, value in without_index(queries).items()}
    queries["attention_mask"][1, 1:][-1:] = 0
    plan = packed_plan(*_positioned(core, documents), _nothing_skipped)
    call = _behind_documents(core, plan.calls[0], queries)
    with _evaluating(core), _recorded_dtype(core) as dtypes:
        apart = [*plan.calls, queries]
        expected = torch.cat([token_embeddings(core, features).flatten(0, 1) for features in apart])
        joint = token_embeddings(core, call).flatten(0, 1)
    _try_dropout(core, [call])
    _compare(core, joint, expected, dtypes, "beside documents than apart from them")


def _try_dropout(core: nn.Module, calls: Sequence[dict[str, Tensor]]) -> None:
    """Make calls as in training: dropout may be what packed attention cannot do."""
    if not core.training:
        return
    device = calls[0]["input_ids"].device
    # It must not take random numbers from the run.
    with torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []):
        for call in calls:
            token_embeddings(core, call)


def _compare(core: nn.Module, ours: Tensor, expected: Tensor, dtypes: set[torch.dtype], how: str) -> None:
    error = (F.normalize(ours.double(), dim=-1) - F.normalize(expected.double(), dim=-1)).norm(dim=-1).max().item()
    tolerance = max(_tolerance(dtype, ours.device) for dtype in dtypes)
    if not error <= tolerance:
        raise PackingUnsupported(
            f"{type(_encoder(core)).__name__} gives other token embeddings {how} "
            f"(distance {error:.1e} between unit vectors, rounding explains {tolerance:.0e})"
        )


@contextmanager
def _evaluating(core: nn.Module) -> Iterator[None]:
    training = {module: module.training for module in core.modules()}
    core.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, flag in training.items():
            module.training = flag


@contextmanager
def _recorded_dtype(core: nn.Module) -> Iterator[set[torch.dtype]]:
    """The dtypes that the last module computes in; what leaves the model may have been cast back to float32."""
    dtypes: set[torch.dtype] = set()
    last = list(core.children())[-1]
    hook = last.register_forward_hook(lambda _module, _args, output: dtypes.add(output["token_embeddings"].dtype))
    try:
        yield dtypes
    finally:
        hook.remove()


def _tolerance(dtype: torch.dtype, device: torch.device) -> float:
    if dtype == torch.float32 and device.type == "cuda" and torch.get_float32_matmul_precision() != "highest":
        return _TOLERANCE_TF32
    return _TOLERANCE[dtype]


def _nothing_skipped(input_ids: Tensor) -> Tensor:
    return torch.zeros_like(input_ids, dtype=torch.bool)


def _said(error: Exception) -> str:
    """An error as a part of a sentence."""
    lines = str(error).strip().splitlines() or ["no message"]
    return lines[0] if isinstance(error, PackingUnsupported) else f"{type(error).__name__}: {lines[0]}"
