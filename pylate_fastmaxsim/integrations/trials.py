"""Trials on a few texts of a batch: whether an encoder gives without padding what it gives with it, and why not."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pylate_fastmaxsim.integrations.attention import PackingUnsupported, accept_packed_masks
from pylate_fastmaxsim.integrations.documents import Documents, EncodingPlan, grouped_plan, packed_plan, without_index
from pylate_fastmaxsim.integrations.encoders import encoder_of, position_table, positioned, token_embeddings
from pylate_fastmaxsim.integrations.joint import joint_call
from pylate_fastmaxsim.ops.precision import float32_precision

# Distance between unit token vectors that may differ by rounding only.
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.05}
_TOLERANCE_TF32 = 1e-2

# Tokens of a document that has padding behind it.
_SHORT = 3

# Tokens of a call that have every document encoded in one of its own.
_ALONE = 1


def short_to_long(core: nn.Module, documents: Documents) -> Documents:
    """Documents from a few tokens to the longest that fits a batch, made of its tokens.

    What an encoder does not pass on, as a window of its attention, may show in long documents only, what it makes of
    padding only where there is some, and rotary positions that it scales only between two lengths. The first batch need
    not have any.
    """
    tokens = documents.input_ids.reshape(-1)[documents.token_index]
    if not len(tokens):
        tokens = documents.input_ids[0]
    longest = width = documents.max_length
    padding = getattr(core.tokenizer, "pad_token_id", None) or 0
    table = position_table(core)
    if table is not None and width > table.num_embeddings - table.padding_idx - 1:
        # The token that PyLate pads with may have a position, and there is none left.
        longest, padding = table.num_embeddings - table.padding_idx - 1, table.padding_idx
    lengths = [max(1, length) for length in (min(_SHORT, width - 1), longest // 2, longest * 3 // 4, longest)]
    mask = torch.arange(width, device=tokens.device) < torch.tensor(lengths, device=tokens.device)[:, None]
    rows = {
        "input_ids": torch.where(mask, tokens.repeat(-(-width // len(tokens)))[:width], padding),
        "attention_mask": mask.to(documents.attention_mask.dtype),
    }
    if documents.token_type_ids is not None:
        rows["token_type_ids"] = torch.zeros_like(rows["input_ids"])
    return Documents.from_columns([rows])


def why_not_packed(core: nn.Module, samples: Documents) -> str | None:
    """Why such documents cannot be encoded in one row; None if they can."""

    def trial() -> None:
        if "position_ids" not in core._first_module().model_forward_params:
            raise PackingUnsupported(f"{type(encoder_of(core)).__name__} takes no position_ids")
        accept_packed_masks(core._first_module().auto_model.config._attn_implementation)
        # Each alone as well: some encoders scale rotary positions by the longest text of a call.
        _verify(core, samples, [_packed(core, samples), _packed(core, samples, _ALONE)])

    return _what_fails(trial)


def why_not_grouped(core: nn.Module, samples: Documents) -> str | None:
    """Why such documents cannot be encoded in groups of similar length; None if they can."""
    return _what_fails(lambda: _verify(core, samples, [grouped_plan(samples, _nothing_skipped, _ALONE)]))


def why_not_joint(core: nn.Module, samples: Documents, queries: dict[str, Tensor]) -> str | None:
    """Why queries cannot be encoded with packed documents; None if they can."""
    return _what_fails(lambda: _verify_joint(core, samples, queries))


def _packed(core: nn.Module, samples: Documents, token_budget: int | None = None) -> EncodingPlan:
    return packed_plan(*positioned(core, samples), _nothing_skipped, token_budget)


def _what_fails(trial: Callable[[], None]) -> str | None:
    try:
        trial()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever somebody's encoder raises at something it does not know
        return _said(error)
    return None


def _verify(core: nn.Module, documents: Documents, plans: Sequence[EncodingPlan]) -> None:
    """Raise PackingUnsupported where one of the plans gives other token embeddings than padding does."""
    padded = {"input_ids": documents.input_ids, "attention_mask": documents.attention_mask}
    if documents.token_type_ids is not None:
        padded["token_type_ids"] = documents.token_type_ids
    with _evaluating(core), _recorded_dtype(core) as dtypes:
        expected = token_embeddings(core, padded).flatten(0, 1)[documents.token_index]
        batches = [plan.batch([token_embeddings(core, call) for call in plan.calls]) for plan in plans]
    _try_dropout(core, plans[0].calls)
    # After all calls, so that every rank makes as many, whatever it finds.
    for batch in batches:
        offsets = torch.arange(batch.max_length, device=batch.device)
        rows = (batch.starts[:, None] + offsets)[offsets < batch.lengths[:, None]]
        _compare(core, batch.values[rows[batch.keep[rows]]], expected, dtypes, "without padding than with it")


def _verify_joint(core: nn.Module, documents: Documents, queries: dict[str, Tensor]) -> None:
    """Raise PackingUnsupported where queries behind documents get other token embeddings than apart from them."""
    lengths = queries["attention_mask"].sum(dim=1)
    # The longest query and the shortest, which has to have a token that is not attended to.
    rows = torch.stack([lengths.argmax(), lengths.argmin()])
    queries = {key: value[rows].clone() for key, value in without_index(queries).items()}
    queries["attention_mask"][1, 1:][-1:] = 0
    (of_documents,) = _packed(core, documents).calls
    call = joint_call(core, of_documents, queries)
    with _evaluating(core), _recorded_dtype(core) as dtypes:
        apart = [of_documents, queries]
        expected = torch.cat([token_embeddings(core, features).flatten(0, 1) for features in apart])
        joint = token_embeddings(core, call).flatten(0, 1)
    _try_dropout(core, [call])
    _compare(core, joint, expected, dtypes, "beside documents than apart from them")


def _try_dropout(core: nn.Module, calls: Sequence[dict[str, Tensor]]) -> None:
    """Make calls as in training: dropout may be what packed attention cannot do."""
    if not core.training:
        return
    device = calls[0]["input_ids"].device
    # It must not take random numbers from the run, and reentrant checkpointing warns of inputs without gradients.
    with torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "None of the inputs have requires_grad=True")
        for call in calls:
            token_embeddings(core, call)


def _compare(core: nn.Module, ours: Tensor, expected: Tensor, dtypes: set[torch.dtype], how: str) -> None:
    error = (F.normalize(ours.double(), dim=-1) - F.normalize(expected.double(), dim=-1)).norm(dim=-1).max().item()
    tolerance = max(_tolerance(dtype, ours.device) for dtype in dtypes)
    if not error <= tolerance:
        raise PackingUnsupported(
            f"{type(encoder_of(core)).__name__} gives other token embeddings {how} "
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
    if dtype == torch.float32 and device.type == "cuda" and float32_precision(dtype) != "highest":
        return _TOLERANCE_TF32
    return _TOLERANCE[dtype]


def _nothing_skipped(input_ids: Tensor) -> Tensor:
    return torch.zeros_like(input_ids, dtype=torch.bool)


def _said(error: Exception) -> str:
    """An error as a part of a sentence."""
    lines = str(error).strip().splitlines() or ["no message"]
    return lines[0] if isinstance(error, PackingUnsupported) else f"{type(error).__name__}: {lines[0]}"
