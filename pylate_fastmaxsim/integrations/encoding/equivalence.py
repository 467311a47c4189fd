"""The check on the first batch: does an encoder give the same embeddings without padding, and if not, why."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pylate_fastmaxsim._dtypes import float32_precision
from pylate_fastmaxsim.integrations.encoding.attention import PackingUnsupported, accept_packed_masks, is_packed_mask
from pylate_fastmaxsim.integrations.encoding.batch import Documents, positioned, rows_of, token_embeddings
from pylate_fastmaxsim.integrations.encoding.joint import joint_call
from pylate_fastmaxsim.integrations.encoding.masks import changed, masks_of, writes_to
from pylate_fastmaxsim.integrations.encoding.plans import EncodingPlan, grouped_plan, nothing_skipped, packed_plan
from pylate_fastmaxsim.integrations.encoding.token_counts import without_total
from pylate_fastmaxsim.integrations.models.encoders import (
    encoder_of,
    inputs_of,
    position_table,
)
from pylate_fastmaxsim.integrations.models.user_code import custom_module
from pylate_fastmaxsim.integrations.patching.known_sources import LIBRARIES, defined_in

# Distance between unit token vectors that may differ by rounding only.
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 0.05, torch.bfloat16: 0.05}
_TOLERANCE_TF32 = 1e-2

# Encoders with at most so many positions are tried with a longer row: some refuse one although no document in it is
# longer than their positions.
_FEW_POSITIONS = 1024

# Tokens of the shortest document, which has padding.
_SHORT = 3

# A budget of tokens that puts every document into a call of its own.
_ALONE = 1

# A place in a row beyond that of any batch.
_FAR = 2**20


# Attributes that PyTorch itself keeps in a module.
_OF_PYTORCH = frozenset(vars(nn.Module()))


def short_to_long(core: nn.Module, documents: Documents) -> Documents:
    """Documents of four lengths made of the tokens of a batch, from three tokens to the widest batch decided for.

    A window of attention shows in long documents only, a use of padding only beside padding, and scaled rotary
    positions only between two lengths. The first batch need not have such documents.
    """
    tokens = documents.input_ids.reshape(-1)[documents.token_index]
    if not len(tokens):
        tokens = documents.input_ids[0]
    longest = width = _widest(core, documents.max_length)
    padding = getattr(core.tokenizer, "pad_token_id", None) or 0
    table = position_table(core)
    if table is not None and width > table.num_embeddings - table.padding_idx - 1:
        # PyLate's padding token takes a position of RoBERTa's, and none is left.
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
    """The widest batch that the decision holds for, or fewer tokens if the encoder has no more learned positions."""
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
        # Each alone as well: some encoders scale rotary positions by the longest text of a call.
        _verify(core, documents, [_packed(core, documents), _packed(core, samples, _ALONE)])

    otherwise = f"{type(encoder_of(core)).__name__} cannot take packed documents ({{}})"
    return what_fails(trial, samples.input_ids.device, otherwise)


def why_not_grouped(core: nn.Module, samples: Documents) -> str | None:
    """Why such documents cannot be encoded in groups of similar length; None if they can."""
    alone = [grouped_plan(samples, nothing_skipped, _ALONE)]

    def trial() -> None:
        device = samples.input_ids.device.type
        weights = (weight for weight in core.parameters() if weight.is_floating_point())
        if torch.is_autocast_enabled(device) and all(weight.dtype == torch.float32 for weight in weights):
            try:
                # In 16 bits rounding would hide small effects of padding.
                with torch.autocast(device, enabled=False):
                    _verify(core, samples, alone)
            except (PackingUnsupported, torch.OutOfMemoryError):
                raise
            except Exception:  # an attention that takes 16 bits only
                pass
            else:
                return
        _verify(core, samples, alone)

    return what_fails(trial, samples.input_ids.device)


def why_not_joint(core: nn.Module, samples: Documents, queries: dict[str, Tensor]) -> str | None:
    """Why queries cannot be encoded with packed documents; None if they can."""
    return what_fails(lambda: _verify_joint(core, samples, queries), samples.input_ids.device)


def why_not_divided(core: nn.Module, queries: dict[str, Tensor]) -> str | None:
    """Why queries have to be divided into the calls of stock PyLate; None if they need not."""
    return what_fails(lambda: _verify_alone(core, queries), queries["input_ids"].device)


def _packed(core: nn.Module, samples: Documents, token_budget: int | None = None) -> EncodingPlan:
    return packed_plan(*positioned(core, samples), nothing_skipped, token_budget)


def _more_than_positions(core: nn.Module, documents: Documents) -> Documents:
    """The documents, repeated until their row is longer than the encoder's longest text."""
    positions = getattr(encoder_of(core).config, "max_position_embeddings", None) or 0
    times = positions // len(documents.token_index) + 1
    if times == 1 or positions > _FEW_POSITIONS:
        return documents
    return Documents.from_columns([documents.column] * times)


def what_fails(trial: Callable[[], None], device: torch.device, otherwise: str = "{}") -> str | None:
    """What a check raises, as a part of a sentence. Errors of the encoder itself are put into ``otherwise``."""
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            trial()
    except torch.OutOfMemoryError:
        raise
    except PackingUnsupported as error:
        return str(error)
    except Exception as error:  # an encoder may raise anything for input that it does not know
        lines = str(error).strip().splitlines() or ["no message"]
        return otherwise.format(f"{type(error).__name__}: {lines[0].rstrip('.')}")
    finally:
        # Up to PyTorch 2.10 autocast would give the next step weights that were cast here without gradients.
        torch.clear_autocast_cache()
    return None


def _verify(core: nn.Module, documents: Documents, plans: Sequence[EncodingPlan]) -> None:
    """Raise PackingUnsupported if one of the plans gives other token embeddings than padding does.

    A plan has all the documents or the first of them.
    """
    padded = documents.column
    before = masks_of(padded)
    with untouched(core) as core_before, evaluating(core), _recorded_dtypes(core) as dtypes:
        expected = core(padded)["token_embeddings"].flatten(0, 1)[documents.token_index]
        values = [[token_embeddings(core, call) for call in plan.calls] for plan in plans]
        other_masks = changed(padded, before)
        leaks = counts_places = False
        if is_packed_mask(plans[0].calls[0]["attention_mask"]):
            leaks = _leaks(core, documents, *plans[0].calls, *values[0])
            counts_places = _counts_places(core, *plans[0].calls, *values[0])
        replaces_modules = core_before.modules_replaced()
    updates_buffers = _updates_buffers(core, plans[0].calls)
    # Only now, so that every rank makes all calls whatever it finds.
    if replaces_modules:
        # BigBird's attention, for good once a call has short texts only.
        raise PackingUnsupported(f"{_name(core)} replaces its modules by the lengths of the texts in a call")
    if updates_buffers:
        raise PackingUnsupported(f"{_name(core)} updates its buffers in each call")
    if other_masks:
        raise PackingUnsupported(f"{_name(core)} changes input_ids or attention_mask")
    if leaks:
        raise PackingUnsupported(f"{_name(core)} lets the documents of a call influence each other")
    if counts_places:
        raise PackingUnsupported(
            f"{_name(core)} uses the place of a token in its call (cache_position), not its position"
        )
    for plan, of_plan in zip(plans, values, strict=True):
        batch = plan.batch(of_plan)
        offsets = torch.arange(batch.max_length, device=batch.device)
        rows = (batch.starts[:, None] + offsets)[offsets < batch.lengths[:, None]]
        ours = batch.values[rows[batch.keep[rows]]]
        _compare(core, ours, expected[: len(ours)], dtypes, "without padding than with it")


def _verify_joint(core: nn.Module, documents: Documents, queries: dict[str, Tensor]) -> None:
    """Raise PackingUnsupported if queries get other token embeddings behind documents than apart from them."""
    lengths = queries["attention_mask"].sum(dim=1)
    # The longest query and the shortest, whose last token is masked.
    rows = torch.stack([lengths.argmax(), lengths.argmin()])
    queries = {key: value[rows].clone() for key, value in without_total(queries).items()}
    queries["attention_mask"][1, 1:][-1:] = 0
    (of_documents,) = _packed(core, documents).calls
    call = joint_call(core, of_documents, queries)
    with untouched(core), evaluating(core), _recorded_dtypes(core) as dtypes:
        apart = [of_documents, queries]
        expected = torch.cat([token_embeddings(core, features).flatten(0, 1) for features in apart])
        joint = token_embeddings(core, call).flatten(0, 1)
    if _updates_buffers(core, [call]):
        raise PackingUnsupported(f"{_name(core)} updates its buffers in each call")
    _compare(core, joint, expected, dtypes, "beside documents than apart from them")


def _verify_alone(core: nn.Module, queries: dict[str, Tensor]) -> None:
    """Raise PackingUnsupported if a query gets other token embeddings alone than beside another.

    Encoders of transformers with convolutions or recurrences mask padding in calls of several texts only.
    """
    # The same query twice, so that only the shape of the call differs.
    row = queries["attention_mask"].sum(dim=1).argmax().expand(2)
    twice = {key: value[row] for key, value in queries.items()}
    if not core.attend_to_expansion_tokens and twice["attention_mask"].shape[1] > 1:
        # With padding, which later queries will have.
        twice["attention_mask"][:, -1] = 0
    with untouched(core), evaluating(core), _recorded_dtypes(core) as dtypes:
        beside, alone = (token_embeddings(core, rows_of(twice, 0, count))[0] for count in (2, 1))
    if not core.do_query_expansion:
        attended = twice["attention_mask"][0] != 0
        beside, alone = beside[attended], alone[attended]
    _compare(core, alone, beside, dtypes, "for a query alone than beside others")


def _leaks(core: nn.Module, documents: Documents, call: dict[str, Tensor], values: Tensor) -> bool:
    """Whether token embeddings of packed documents change, by a single bit, with the tokens of other documents.

    Shapes stay the same, so that no tolerance is needed. A convolution over neighbouring tokens could hide in one while
    its weights are small.
    """
    tokens = call["input_ids"]
    odd = torch.arange(len(documents), device=tokens.device) % 2 == 1
    odd = odd.repeat_interleave(documents.cu_seqlens.diff(), output_size=tokens.shape[1])
    others = token_embeddings(core, {**call, "input_ids": torch.where(odd, tokens.roll(1), tokens)})
    return not alike(others[:, ~odd], values[:, ~odd])


def _counts_places(core: nn.Module, call: dict[str, Tensor], values: Tensor) -> bool:
    """Whether token embeddings change with ``cache_position`` while ``position_ids`` stay the same.

    Some decoders (Ministral 3, Llama 4) scale attention by it from some place in a row on.
    """
    if "cache_position" not in inputs_of(core):
        return False
    places = torch.arange(_FAR, _FAR + values.shape[1], device=values.device)
    return not alike(token_embeddings(core, {**call, "cache_position": places}), values)


def alike(ours: Tensor, expected: Tensor) -> bool:
    """Whether tensors are the same bit by bit, NaN included, which the comparison with padding reports."""
    return torch.equal(ours.nan_to_num(), expected.nan_to_num())


def _updates_buffers(core: nn.Module, calls: Sequence[dict[str, Tensor]]) -> bool:
    """Whether calls of the model as it is, perhaps in training, change its buffers, such as statistics over texts.

    In training they have dropout, which packed attention may refuse.
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
        # An encoder that computes in 16 bits may return float32, from its last norm.
        dtypes = {*dtypes, torch.get_autocast_dtype(device)}
    tolerance = max(_tolerance(dtype) for dtype in dtypes)
    if not error <= tolerance:
        raise PackingUnsupported(
            f"{_name(core)} gives other token embeddings {how} "
            f"(distance {error:.1e} between unit vectors, rounding explains {tolerance:.0e})"
        )


@contextmanager
def evaluating(core: nn.Module) -> Iterator[None]:
    """Context without gradients in which every module of a model is in evaluation."""
    training = {module: module.training for module in core.modules()}
    # Not core.eval(): a model's train() may do more, such as merging adapters.
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
    """The dtypes that modules return; the model may cast its output back to float32."""
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
    """The encoder, and a module of the user's that may be the cause."""
    encoder, own = type(encoder_of(core)).__name__, custom_module(core)
    return encoder if own is None else f"{encoder} with {type(own).__name__}"


class Snapshot:
    """Buffers and hooks of a model at one time, and attributes and submodules of its modules of transformers."""

    def __init__(self, core: nn.Module) -> None:
        self.modules = [(module, dict(module._buffers)) for module in core.modules()]
        self.values = {buffer: (buffer.detach().clone(), writes_to(buffer)) for buffer in core.buffers()}
        # Rotary embeddings of transformers keep the longest length there, and BigBird puts another attention in the
        # place of its own when texts are short. FSDP prepares its own modules in their first call, for good.
        self.of_transformers = [
            (module, _attributes(module), dict(module._modules))
            for module in core.modules()
            if _of_transformers(module)
        ]
        # To return outputs of layers, transformers adds hooks in the first call and keeps in an attribute that it has.
        hooks = [each for part in core.modules() for each in (part._forward_hooks, part._forward_pre_hooks)]
        self.hooks = [(of_module, set(of_module)) for of_module in hooks]

    def state_changed(self) -> bool:
        """Whether a buffer was changed."""
        return any(
            module._buffers.keys() != buffers.keys()
            or any(self._holds_else(module._buffers[name], buffer) for name, buffer in buffers.items())
            for module, buffers in self.modules
        )

    def modules_replaced(self) -> bool:
        """Whether a module of transformers has other submodules now."""
        return any(module._modules != submodules for module, _, submodules in self.of_transformers)

    def _holds_else(self, now: Tensor | None, buffer: Tensor | None) -> bool:
        if now is None or buffer is None:
            return now is not buffer
        before, _ = self.values[buffer]
        return now.shape != before.shape or not torch.equal(now, before)

    def restore(self) -> None:
        """Restore all of it."""
        for module, buffers in self.modules:
            module._buffers.clear()
            module._buffers.update(buffers)
        for tensor, (value, writes) in self.values.items():
            # Writing to an unchanged buffer would break a backward that is still to come. Batch norm writes without
            # raising the version.
            if writes_to(tensor) != writes or not torch.equal(tensor, value):
                tensor.copy_(value)
        for module, attributes, submodules in self.of_transformers:
            for name in _attributes(module):
                del vars(module)[name]
            vars(module).update(attributes)
            module._modules.clear()
            module._modules.update(submodules)
        for hooks, before in self.hooks:
            for key in hooks.keys() - before:
                # Training libraries prepare a model in its first call, for good.
                if not defined_in(hooks[key], LIBRARIES):
                    del hooks[key]


@contextmanager
def untouched(core: nn.Module) -> Iterator[Snapshot]:
    """Context that restores a model at its end.

    Examples
    --------
    >>> norm = nn.BatchNorm1d(2)
    >>> with untouched(norm) as before:
    ...     _ = norm(torch.ones(3, 2))
    ...     print(before.state_changed())
    True
    >>> norm.num_batches_tracked
    tensor(0)
    """
    before = Snapshot(core)
    try:
        yield before
    finally:
        with torch.no_grad():
            before.restore()


def _attributes(module: nn.Module) -> dict[str, object]:
    return {name: value for name, value in vars(module).items() if name not in _OF_PYTORCH}


def _of_transformers(module: nn.Module) -> bool:
    return type(module).__module__.partition(".")[0] in ("transformers", "transformers_modules")


def holds_up_to(width: int) -> int:
    """Up to which width of batches a decision holds that was made for ``width``: the next power of two.

    Examples
    --------
    >>> [holds_up_to(width) for width in (1, 256, 257, 300)]
    [1, 256, 512, 512]
    """
    return 1 << (width - 1).bit_length()
