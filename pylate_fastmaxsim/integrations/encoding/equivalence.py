"""Trials on a few texts of a batch: whether an encoder gives without padding what it gives with it, and why not."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pylate_fastmaxsim._dtypes import float32_precision
from pylate_fastmaxsim.integrations.encoding.attention import PackingUnsupported, accept_packed_masks, is_packed_mask
from pylate_fastmaxsim.integrations.encoding.batch import Documents, rows_of
from pylate_fastmaxsim.integrations.encoding.calls import positioned, token_embeddings
from pylate_fastmaxsim.integrations.encoding.joint import joint_call
from pylate_fastmaxsim.integrations.encoding.mask_changes import changed, masks_of
from pylate_fastmaxsim.integrations.encoding.mode_cache import holds_up_to
from pylate_fastmaxsim.integrations.encoding.plans import EncodingPlan, grouped_plan, nothing_skipped, packed_plan
from pylate_fastmaxsim.integrations.encoding.snapshot import untouched
from pylate_fastmaxsim.integrations.encoding.token_counts import without_total
from pylate_fastmaxsim.integrations.models.encoders import (
    encoder_of,
    inputs_of,
    position_table,
)
from pylate_fastmaxsim.integrations.models.user_code import custom_module

# Distance between unit token vectors that may differ by rounding only.
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 0.05, torch.bfloat16: 0.05}
_TOLERANCE_TF32 = 1e-2

# Encoders with so many positions at most are given a row that is longer: some refuse it though they need no position
# behind their last one.
_FEW_POSITIONS = 1024

# Tokens of a document that has padding behind it.
_SHORT = 3

# Tokens of a call that have every document encoded in one of its own.
_ALONE = 1

# Farther into a row than any batch reaches.
_FAR = 2**20


def short_to_long(core: nn.Module, documents: Documents) -> Documents:
    """Documents from a few tokens to the longest that fits a batch, made of its tokens.

    What an encoder does not pass on, as a window of its attention, may show in long documents only, what it makes of
    padding only where there is some, and rotary positions that it scales only between two lengths. The first batch need
    not have any. The longest is as long as any for which one process decides (:func:`decisions.decided`).
    """
    tokens = documents.input_ids.reshape(-1)[documents.token_index]
    if not len(tokens):
        tokens = documents.input_ids[0]
    longest = width = _widest(core, documents.max_length)
    padding = getattr(core.tokenizer, "pad_token_id", None) or 0
    table = position_table(core)
    if table is not None and width > table.num_embeddings - table.padding_idx - 1:
        # The token that PyLate pads with may have a position, and there is none left.
        longest, padding = table.num_embeddings - table.padding_idx - 1, table.padding_idx
    lengths = [min(_SHORT, width - 1), longest // 2, longest * 3 // 4, longest]
    lengths = [max(1, length) for length in lengths]
    mask = torch.arange(width, device=tokens.device) < torch.tensor(lengths, device=tokens.device)[:, None]
    rows = {
        "input_ids": torch.where(mask, tokens.repeat(-(-width // len(tokens)))[:width], padding),
        "attention_mask": mask.to(documents.attention_mask.dtype),
    }
    if documents.token_type_ids is not None:
        rows["token_type_ids"] = torch.zeros_like(rows["input_ids"])
    return Documents.from_columns([rows])


def _widest(core: nn.Module, width: int) -> int:
    """The widest batch that is not decided about anew, as far as the encoder has learned positions."""
    widest, config = holds_up_to(width), encoder_of(core).config
    if any(getattr(config, name, None) for name in ("rope_parameters", "rope_scaling", "rope_theta")):
        return widest
    return max(width, min(widest, getattr(config, "max_position_embeddings", None) or widest))


def why_not_packed(core: nn.Module, samples: Documents) -> str | None:
    """Why such documents cannot be encoded in one row; None if they can."""

    def trial() -> None:
        if "position_ids" not in inputs_of(core):
            raise PackingUnsupported(f"{type(encoder_of(core)).__name__} takes no position_ids")
        accept_packed_masks(encoder_of(core))
        documents = _more_than_positions(core, samples)
        # Each alone as well: some encoders scale rotary positions by the longest text of a call. Once each, so that
        # every rank makes as many calls.
        _verify(core, documents, [_packed(core, documents), _packed(core, samples, _ALONE)])

    otherwise = f"{type(encoder_of(core)).__name__} cannot take packed documents ({{}})"
    return _what_fails(trial, samples.input_ids.device, otherwise)


def why_not_grouped(core: nn.Module, samples: Documents) -> str | None:
    """Why such documents cannot be encoded in groups of similar length; None if they can."""
    alone = [grouped_plan(samples, nothing_skipped, _ALONE)]

    def trial() -> None:
        device = samples.input_ids.device.type
        weights = (weight for weight in core.parameters() if weight.is_floating_point())
        if torch.is_autocast_enabled(device) and all(weight.dtype == torch.float32 for weight in weights):
            try:
                # In 16 bits rounding would hide what an encoder makes of padding.
                with torch.autocast(device, enabled=False):
                    _verify(core, samples, alone)
            except (PackingUnsupported, torch.OutOfMemoryError):
                raise
            except Exception:  # an attention that takes 16 bits only
                pass
            else:
                return
        _verify(core, samples, alone)

    return _what_fails(trial, samples.input_ids.device)


def why_not_joint(core: nn.Module, samples: Documents, queries: dict[str, Tensor]) -> str | None:
    """Why queries cannot be encoded with packed documents; None if they can."""
    return _what_fails(lambda: _verify_joint(core, samples, queries), samples.input_ids.device)


def why_not_divided(core: nn.Module, queries: dict[str, Tensor]) -> str | None:
    """Why queries cannot be divided into other calls than stock PyLate's; None if they can."""
    return _what_fails(lambda: _verify_alone(core, queries), queries["input_ids"].device)


def _packed(core: nn.Module, samples: Documents, token_budget: int | None = None) -> EncodingPlan:
    return packed_plan(*positioned(core, samples), nothing_skipped, token_budget)


def _more_than_positions(core: nn.Module, documents: Documents) -> Documents:
    """The documents as often as it takes for their row to be longer than the encoder's longest text."""
    positions = getattr(encoder_of(core).config, "max_position_embeddings", None) or 0
    times = positions // len(documents.token_index) + 1
    if times == 1 or positions > _FEW_POSITIONS:
        return documents
    return Documents.from_columns([documents.column] * times)


def _what_fails(trial: Callable[[], None], device: torch.device, otherwise: str = "{}") -> str | None:
    """What a trial raises, as a part of a sentence; what the encoder itself raises, within ``otherwise``."""
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            trial()
    except torch.OutOfMemoryError:
        raise
    except PackingUnsupported as error:
        return str(error)
    except Exception as error:  # whatever somebody's encoder raises at something it does not know
        lines = str(error).strip().splitlines() or ["no message"]
        return otherwise.format(f"{type(error).__name__}: {lines[0].rstrip('.')}")
    finally:
        # Up to PyTorch 2.10 autocast hands weights that were cast here, without gradients, to the step that follows.
        torch.clear_autocast_cache()
    return None


def _verify(core: nn.Module, documents: Documents, plans: Sequence[EncodingPlan]) -> None:
    """Raise PackingUnsupported where one of the plans gives other token embeddings than padding does.

    Every plan is of all the documents or of the first of them.
    """
    padded = documents.column
    before = masks_of(padded)
    with untouched(core), _evaluating(core), _recorded_dtypes(core) as dtypes:
        expected = core(padded)["token_embeddings"].flatten(0, 1)[documents.token_index]
        values = [[token_embeddings(core, call) for call in plan.calls] for plan in plans]
        other_masks = changed(padded, before)
        leaks = counts_places = False
        if is_packed_mask(plans[0].calls[0]["attention_mask"]):
            leaks = _leaks(core, documents, *plans[0].calls, *values[0])
            counts_places = _counts_places(core, *plans[0].calls, *values[0])
    remembers = _remembers(core, plans[0].calls)
    # After all calls, so that every rank makes as many, whatever it finds.
    if remembers:
        raise PackingUnsupported(f"{_name(core)} remembers something of each call")
    if other_masks:
        raise PackingUnsupported(f"{_name(core)} changes input_ids or attention_mask")
    if leaks:
        raise PackingUnsupported(f"{_name(core)} lets the documents of a call see each other")
    if counts_places:
        raise PackingUnsupported(f"{_name(core)} looks at the place of a token in its call, whatever its position")
    for plan, of_plan in zip(plans, values, strict=True):
        batch = plan.batch(of_plan)
        offsets = torch.arange(batch.max_length, device=batch.device)
        rows = (batch.starts[:, None] + offsets)[offsets < batch.lengths[:, None]]
        ours = batch.values[rows[batch.keep[rows]]]
        _compare(core, ours, expected[: len(ours)], dtypes, "without padding than with it")


def _verify_joint(core: nn.Module, documents: Documents, queries: dict[str, Tensor]) -> None:
    """Raise PackingUnsupported where queries behind documents get other token embeddings than apart from them."""
    lengths = queries["attention_mask"].sum(dim=1)
    # The longest query and the shortest, which has to have a token that is not attended to.
    rows = torch.stack([lengths.argmax(), lengths.argmin()])
    queries = {key: value[rows].clone() for key, value in without_total(queries).items()}
    queries["attention_mask"][1, 1:][-1:] = 0
    (of_documents,) = _packed(core, documents).calls
    call = joint_call(core, of_documents, queries)
    with untouched(core), _evaluating(core), _recorded_dtypes(core) as dtypes:
        apart = [of_documents, queries]
        expected = torch.cat([token_embeddings(core, features).flatten(0, 1) for features in apart])
        joint = token_embeddings(core, call).flatten(0, 1)
    if _remembers(core, [call]):
        raise PackingUnsupported(f"{_name(core)} remembers something of each call")
    _compare(core, joint, expected, dtypes, "beside documents than apart from them")


def _verify_alone(core: nn.Module, queries: dict[str, Tensor]) -> None:
    """Raise PackingUnsupported where a query in a call of its own gets other token embeddings than beside another.

    Of transformers, encoders with convolutions or recurrences leave padding out of calls of several texts only.
    """
    # The same query twice: to be beside it changes nothing but the shape of the call.
    row = queries["attention_mask"].sum(dim=1).argmax().expand(2)
    twice = {key: value[row] for key, value in queries.items()}
    if not core.attend_to_expansion_tokens and twice["attention_mask"].shape[1] > 1:
        # Of queries that are all as long as they may be, this one has padding too: later ones will have some.
        twice["attention_mask"][:, -1] = 0
    with untouched(core), _evaluating(core), _recorded_dtypes(core) as dtypes:
        beside, alone = (token_embeddings(core, rows_of(twice, 0, count))[0] for count in (2, 1))
    if not core.do_query_expansion:
        attended = twice["attention_mask"][0] != 0
        beside, alone = beside[attended], alone[attended]
    _compare(core, alone, beside, dtypes, "for a query alone than beside others")


def _leaks(core: nn.Module, documents: Documents, call: dict[str, Tensor], values: Tensor) -> bool:
    """Whether token embeddings of packed documents change when every other document is given other tokens.

    Not by a single bit: shapes are the same. That needs no tolerance, in which a convolution over neighbouring tokens
    would hide while its weights are small.
    """
    tokens = call["input_ids"]
    odd = torch.arange(len(documents), device=tokens.device) % 2 == 1
    odd = odd.repeat_interleave(documents.cu_seqlens.diff(), output_size=tokens.shape[1])
    others = token_embeddings(core, {**call, "input_ids": torch.where(odd, tokens.roll(1), tokens)})
    return not _alike(others[:, ~odd], values[:, ~odd])


def _counts_places(core: nn.Module, call: dict[str, Tensor], values: Tensor) -> bool:
    """Whether token embeddings change where the same row begins far behind, though ``position_ids`` stay as they are.

    Some decoders sharpen attention by ``cache_position``, from a place on that the few documents of a trial do not
    reach.
    """
    if "cache_position" not in inputs_of(core):
        return False
    places = torch.arange(_FAR, _FAR + values.shape[1], device=values.device)
    return not _alike(token_embeddings(core, {**call, "cache_position": places}), values)


def _alike(ours: Tensor, expected: Tensor) -> bool:
    """Whether token embeddings are the same bit by bit."""
    # What is not a number is not equal to itself; the comparison with padding says so.
    return torch.equal(ours.nan_to_num(), expected.nan_to_num())


def _remembers(core: nn.Module, calls: Sequence[dict[str, Tensor]]) -> bool:
    """Make calls as the model is, in training with dropout, which may be what packed attention cannot do.

    Returns whether the model keeps statistics over the texts of a call, which differ where texts are divided into other
    calls.
    """
    with torch.no_grad(), warnings.catch_warnings(), untouched(core) as before:
        # Reentrant checkpointing warns of inputs without gradients.
        warnings.filterwarnings("ignore", "None of the inputs have requires_grad=True")
        for call in calls:
            token_embeddings(core, call)
        return before.state_changed()


def _compare(core: nn.Module, ours: Tensor, expected: Tensor, dtypes: set[torch.dtype], how: str) -> None:
    error = (F.normalize(ours.double(), dim=-1) - F.normalize(expected.double(), dim=-1)).norm(dim=-1).max().item()
    device = ours.device.type
    if torch.is_autocast_enabled(device):
        # An encoder may answer in float32, as its last norm does, and has computed in 16 bits all the same.
        dtypes = {*dtypes, torch.get_autocast_dtype(device)}
    tolerance = max(_tolerance(dtype) for dtype in dtypes)
    if not error <= tolerance:
        raise PackingUnsupported(
            f"{_name(core)} gives other token embeddings {how} "
            f"(distance {error:.1e} between unit vectors, rounding explains {tolerance:.0e})"
        )


@contextmanager
def _evaluating(core: nn.Module) -> Iterator[None]:
    training = {module: module.training for module in core.modules()}
    # Not core.eval(): what somebody's own train() does besides, as to merge adapters, is nothing to do for a trial.
    for module in training:
        module.training = False
    try:
        with torch.no_grad():
            yield
    finally:
        for module, flag in training.items():
            module.training = flag


@contextmanager
def _recorded_dtypes(core: nn.Module) -> Iterator[set[torch.dtype]]:
    """The dtypes that the modules answer in; what leaves them may have been cast back to float32."""
    dtypes: set[torch.dtype] = set()

    def record(_module: nn.Module, _args: tuple, output: dict[str, Tensor]) -> None:
        if isinstance(output, dict) and "token_embeddings" in output:
            dtypes.add(output["token_embeddings"].dtype)

    hooks = [module.register_forward_hook(record) for module in (core, *core.children())]
    try:
        yield dtypes
    finally:
        for hook in hooks:
            hook.remove()


def _tolerance(dtype: torch.dtype) -> float:
    return _TOLERANCE[dtype] if float32_precision(dtype) == "highest" else _TOLERANCE_TF32


def _name(core: nn.Module) -> str:
    """Of the encoder, and of a module of somebody's own that may be what is meant."""
    encoder, own = type(encoder_of(core)).__name__, custom_module(core)
    return encoder if own is None else f"{encoder} with {type(own).__name__}"
