"""The check on the first batch: does an encoder give the same embeddings without padding, and if not, why."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pylate_fastmaxsim._dtypes import float32_precision
from pylate_fastmaxsim.cpu.live_tokens import live_tokens
from pylate_fastmaxsim.integrations.encoding.attention import PackingUnsupported, accept_packed_masks
from pylate_fastmaxsim.integrations.encoding.batch import Documents
from pylate_fastmaxsim.integrations.encoding.masks import changed, masks_of
from pylate_fastmaxsim.integrations.encoding.plans import (
    EncodingPlan,
    grouped_plan,
    joint_call,
    packed_plan,
    rows_of,
    token_embeddings,
)
from pylate_fastmaxsim.integrations.encoding.token_counts import without_total
from pylate_fastmaxsim.integrations.models.encoders import encoder_of, inputs_of, is_packed_mask, position_table
from pylate_fastmaxsim.integrations.models.user_code import custom_module
from pylate_fastmaxsim.integrations.patching.known_sources import LIBRARIES, defined_in

# Distance between unit token vectors that may differ by rounding only.
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 0.05, torch.bfloat16: 0.05}
_TOLERANCE_TF32 = 1e-2

# Encoders with at most so many positions are tried with a longer row: some refuse one although no document in it is
# longer than their positions.
_FEW_POSITIONS = 1024

# Attributes that PyTorch itself keeps in a module.
_OF_PYTORCH = frozenset(vars(nn.Module()))


def checked_width(width: int) -> int:
    """The next power of two from a width on: a decision made for it holds for batches up to there."""
    return 1 << (width - 1).bit_length()


def sample_documents(core: nn.Module, documents: Documents) -> Documents:
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
    # The shortest has padding.
    lengths = [min(3, width - 1), longest // 2, longest * 3 // 4, longest]
    lengths = torch.tensor(lengths, device=tokens.device).clamp(min=1)
    mask = torch.arange(width, device=tokens.device) < lengths[:, None]
    rows = {
        "input_ids": torch.where(mask, tokens.repeat(-(-width // len(tokens)))[:width], padding),
        "attention_mask": mask.to(documents.attention_mask.dtype),
    }
    if documents.token_type_ids is not None:
        rows["token_type_ids"] = torch.zeros_like(rows["input_ids"])
    return Documents.from_columns([rows])


def _widest(core: nn.Module, width: int) -> int:
    """The widest batch that the decision holds for, or fewer tokens if the encoder has no more learned positions."""
    widest, config = checked_width(width), encoder_of(core).config
    if any(getattr(config, name, None) for name in ("rope_parameters", "rope_scaling", "rope_theta")):
        return widest
    return max(width, min(widest, getattr(config, "max_position_embeddings", None) or widest))


def reason_against_packing(core: nn.Module, samples: Documents) -> str | None:
    """Reason not to encode such documents in one row."""
    name = type(encoder_of(core)).__name__
    with trial(samples.input_ids.device, f"{name} cannot take packed documents ({{}})") as found:
        if "position_ids" not in inputs_of(core):
            raise PackingUnsupported(f"{name} takes no position_ids")
        accept_packed_masks(encoder_of(core))
        # In a row that is longer than the encoder's longest text.
        positions = getattr(encoder_of(core).config, "max_position_embeddings", None) or 0
        times = positions // len(samples.token_index) + 1
        documents = samples
        if times > 1 and positions <= _FEW_POSITIONS:
            documents = Documents.from_columns([samples.column] * times)
        # With a budget of one token each is alone: some encoders scale rotary positions by the longest text of a call.
        _verify(core, documents, [packed_plan(core, documents), packed_plan(core, samples, token_budget=1)])
    return found.reason


def reason_against_groups(core: nn.Module, samples: Documents) -> str | None:
    """Reason not to encode such documents in groups of similar length."""
    alone, device = [grouped_plan(samples, token_budget=1)], samples.input_ids.device
    weights = (weight for weight in core.parameters() if weight.is_floating_point())
    with trial(device) as found:
        if torch.is_autocast_enabled(device.type) and all(weight.dtype == torch.float32 for weight in weights):
            try:
                # In 16 bits rounding would hide small effects of padding.
                with torch.autocast(device.type, enabled=False):
                    _verify(core, samples, alone)
                return None
            except (PackingUnsupported, torch.OutOfMemoryError):
                raise
            except Exception:  # an attention that takes 16 bits only
                pass
        _verify(core, samples, alone)
    return found.reason


def reason_against_joining(core: nn.Module, documents: Documents, queries: dict[str, Tensor]) -> str | None:
    """Reason not to encode queries with packed documents."""
    with trial(documents.input_ids.device) as found:
        lengths = queries["attention_mask"].sum(dim=1)
        # The longest query and the shortest, whose last token is masked.
        rows = torch.stack([lengths.argmax(), lengths.argmin()])
        samples = {key: value[rows].clone() for key, value in without_total(queries).items()}
        samples["attention_mask"][1, 1:][-1:] = 0
        (of_documents,) = packed_plan(core, documents).calls
        call = joint_call(core, of_documents, samples)
        with Restoring(core), evaluating(core), _recorded_dtypes(core) as dtypes:
            apart = [of_documents, samples]
            expected = torch.cat([token_embeddings(core, features).flatten(0, 1) for features in apart])
            joint = token_embeddings(core, call).flatten(0, 1)
        _refuse_if(_updates_buffers(core, [call]), core, "updates its buffers in each call")
        _compare(core, joint, expected, dtypes, "beside documents than apart from them")
    return found.reason


def reason_against_dividing(core: nn.Module, queries: dict[str, Tensor]) -> str | None:
    """Reason to divide queries into the calls of stock PyLate: a query gets other embeddings alone than beside another.

    Encoders of transformers with convolutions or recurrences mask padding in calls of several texts only.
    """
    with trial(queries["input_ids"].device) as found:
        # The same query twice, so that only the shape of the call differs.
        row = queries["attention_mask"].sum(dim=1).argmax().expand(2)
        twice = {key: value[row] for key, value in queries.items()}
        if not core.attend_to_expansion_tokens and twice["attention_mask"].shape[1] > 1:
            # With padding, which later queries will have.
            twice["attention_mask"][:, -1] = 0
        with Restoring(core), evaluating(core), _recorded_dtypes(core) as dtypes:
            beside, alone = (token_embeddings(core, rows_of(twice, slice(count)))[0] for count in (2, 1))
        if not core.do_query_expansion:
            attended = twice["attention_mask"][0] != 0
            beside, alone = beside[attended], alone[attended]
        _compare(core, alone, beside, dtypes, "for a query alone than beside others")
    return found.reason


@contextmanager
def trial(device: torch.device, otherwise: str = "{}") -> Iterator[SimpleNamespace]:
    """Context that ends with an error, its ``reason`` as a part of a sentence; None without one.

    Errors of the encoder itself are put into ``otherwise``.
    """
    found = SimpleNamespace(reason=None)
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield found
    except torch.OutOfMemoryError:
        raise
    except PackingUnsupported as error:
        found.reason = str(error)
    except Exception as error:  # an encoder may raise anything for input that it does not know
        lines = str(error).strip().splitlines() or ["no message"]
        found.reason = otherwise.format(f"{type(error).__name__}: {lines[0].rstrip('.')}")
    finally:
        # Up to PyTorch 2.10 autocast would give the next step weights that were cast here without gradients.
        torch.clear_autocast_cache()


def _verify(core: nn.Module, documents: Documents, plans: Sequence[EncodingPlan]) -> None:
    """Raise PackingUnsupported if one of the plans gives other token embeddings than padding does.

    A plan has all the documents or the first of them.
    """
    padded = documents.column
    before = masks_of(padded)
    with Restoring(core) as core_before, evaluating(core), _recorded_dtypes(core) as dtypes:
        expected = core(padded)["token_embeddings"].flatten(0, 1)[documents.token_index]
        values = [[token_embeddings(core, call) for call in plan.calls] for plan in plans]
        changes_masks = changed(padded, before)
        leaks = counts_places = False
        if is_packed_mask(plans[0].calls[0]["attention_mask"]):
            leaks = _leaks(core, documents, *plans[0].calls, *values[0])
            counts_places = _counts_places(core, *plans[0].calls, *values[0])
        replaces_modules = core_before.modules_replaced()
    updates_buffers = _updates_buffers(core, plans[0].calls)
    # Only now, so that every rank makes all calls whatever it finds. BigBird replaces its attention, for good, once a
    # call has short texts only.
    _refuse_if(replaces_modules, core, "replaces its modules by the lengths of the texts in a call")
    _refuse_if(updates_buffers, core, "updates its buffers in each call")
    _refuse_if(changes_masks, core, "changes input_ids or attention_mask")
    _refuse_if(leaks, core, "lets the documents of a call influence each other")
    _refuse_if(counts_places, core, "uses the place of a token in its call (cache_position), not its position")
    for plan, of_plan in zip(plans, values, strict=True):
        batch = plan.batch(of_plan)
        ours = batch.values[live_tokens(batch.starts, batch.lengths, batch.keep).row]
        _compare(core, ours, expected[: len(ours)], dtypes, "without padding than with it")


def _leaks(core: nn.Module, documents: Documents, call: dict[str, Tensor], values: Tensor) -> bool:
    """Check whether embeddings of packed documents change, by a single bit, with the tokens of other documents.

    Shapes stay the same, so that no tolerance is needed. A convolution over neighbouring tokens could hide in one while
    its weights are small.
    """
    tokens = call["input_ids"]
    odd = torch.arange(len(documents), device=tokens.device) % 2 == 1
    odd = odd.repeat_interleave(documents.cu_seqlens.diff(), output_size=tokens.shape[1])
    others = token_embeddings(core, {**call, "input_ids": torch.where(odd, tokens.roll(1), tokens)})
    return not bitwise_equal(others[:, ~odd], values[:, ~odd])


def _counts_places(core: nn.Module, call: dict[str, Tensor], values: Tensor) -> bool:
    """Check whether embeddings change with ``cache_position`` while ``position_ids`` stay the same.

    Some decoders (Ministral 3, Llama 4) scale attention by it from some place in a row on.
    """
    if "cache_position" not in inputs_of(core):
        return False
    # Beyond the places of any batch.
    places = torch.arange(values.shape[1], device=values.device) + 2**20
    return not bitwise_equal(token_embeddings(core, {**call, "cache_position": places}), values)


def bitwise_equal(ours: Tensor, expected: Tensor) -> bool:
    """Compare bit by bit, NaN included, which the comparison with padding reports."""
    return torch.equal(ours.nan_to_num(), expected.nan_to_num())


def _updates_buffers(core: nn.Module, calls: Sequence[dict[str, Tensor]]) -> bool:
    """Check whether calls of the model as it is, perhaps in training, change its buffers, such as statistics of texts.

    In training they have dropout, which packed attention may refuse.
    """
    with torch.no_grad(), warnings.catch_warnings(), Restoring(core) as before:
        # Reentrant checkpointing warns of inputs without gradients.
        warnings.filterwarnings("ignore", "None of the inputs have requires_grad=True")
        for call in calls:
            token_embeddings(core, call)
        return before.buffers_changed()


def _refuse_if(found: bool, core: nn.Module, what: str) -> None:
    if found:
        # The encoder, and a module of the user's that may be the cause.
        own = custom_module(core)
        behind = "" if own is None else f" with {type(own).__name__}"
        raise PackingUnsupported(f"{type(encoder_of(core)).__name__}{behind} {what}")


def _compare(core: nn.Module, ours: Tensor, expected: Tensor, dtypes: set[torch.dtype], how: str) -> None:
    error = (F.normalize(ours.double(), dim=-1) - F.normalize(expected.double(), dim=-1)).norm(dim=-1).max().item()
    if torch.is_autocast_enabled(ours.device.type):
        # An encoder that computes in 16 bits may return float32, from its last norm.
        dtypes = {*dtypes, torch.get_autocast_dtype(ours.device.type)}
    tolerance = max(_TOLERANCE[dtype] if float32_precision(dtype) == "highest" else _TOLERANCE_TF32 for dtype in dtypes)
    distance = f"distance {error:.1e} between unit vectors, rounding explains {tolerance:.0e}"
    _refuse_if(not error <= tolerance, core, f"gives other token embeddings {how} ({distance})")


@contextmanager
def _recorded_dtypes(core: nn.Module) -> Iterator[set[torch.dtype]]:
    """Dtypes that modules return; the model, or accelerate around its forward, may cast its output back to float32."""
    dtypes: set[torch.dtype] = set()

    def record(_module: nn.Module, _args: tuple, output: dict[str, Tensor]) -> None:
        if isinstance(output, dict) and "token_embeddings" in output:
            dtypes.add(output["token_embeddings"].dtype)

    with ExitStack() as stack:
        for module in (core, *core.children()):
            stack.callback(module.register_forward_hook(record).remove)
        yield dtypes


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


class Restoring(AbstractContextManager):
    """Context at whose end a model has the buffers and hooks that it had, and its modules of transformers all they had."""

    def __init__(self, core: nn.Module) -> None:
        self._buffers = [(module._buffers, dict(module._buffers)) for module in core.modules()]
        self._values = {buffer: buffer.detach().clone() for buffer in core.buffers()}
        # Rotary embeddings of transformers keep the longest length there, and BigBird puts another attention in the
        # place of its own when texts are short. FSDP prepares its own modules in their first call, for good.
        self._of_transformers = [
            (module, _attributes(module), dict(module._modules))
            for module in core.modules()
            if type(module).__module__.partition(".")[0] in ("transformers", "transformers_modules")
        ]
        # To return outputs of layers, transformers adds hooks in the first call and keeps in an attribute that it has.
        hooks = [each for part in core.modules() for each in (part._forward_hooks, part._forward_pre_hooks)]
        self._hooks = [(of_module, set(of_module)) for of_module in hooks]

    def buffers_changed(self) -> bool:
        """Check whether a buffer was written to, added, removed or replaced by another value."""
        return any(
            now.keys() != before.keys() or any(self._differs(now[name], before[name]) for name in now)
            for now, before in self._buffers
        )

    def _differs(self, now: Tensor | None, buffer: Tensor | None) -> bool:
        if now is None or buffer is None:
            return now is not buffer
        return not torch.equal(now, self._values[buffer])

    def modules_replaced(self) -> bool:
        """Check whether a module of transformers has other submodules now."""
        return any(module._modules != submodules for module, _, submodules in self._of_transformers)

    @torch.no_grad()
    def __exit__(self, *_error: object) -> None:
        for now, before in self._buffers:
            now.clear()
            now.update(before)
        for buffer, value in self._values.items():
            # Writing to an unchanged buffer would break a backward that is still to come.
            if not torch.equal(buffer, value):
                buffer.copy_(value)
        for module, attributes, submodules in self._of_transformers:
            for name in _attributes(module):
                del vars(module)[name]
            vars(module).update(attributes)
            module._modules.clear()
            module._modules.update(submodules)
        for hooks, before in self._hooks:
            for key in hooks.keys() - before:
                # Training libraries prepare a model in its first call, for good.
                if not defined_in(hooks[key], LIBRARIES):
                    del hooks[key]


def _attributes(module: nn.Module) -> dict[str, object]:
    return {name: value for name, value in vars(module).items() if name not in _OF_PYTORCH}
