"""The head of a masked language model up to its decoder, whose vocabulary logits need not be computed."""

from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from pylate_fastmaxsim.integrations.encoding.attention import PackingUnsupported
from pylate_fastmaxsim.integrations.encoding.equivalence import Restoring, evaluating, trial
from pylate_fastmaxsim.integrations.models.encoders import HiddenStates, encoder_of, with_adapters
from pylate_fastmaxsim.integrations.models.user_code import has_hooks, user_code, without_user_hooks
from pylate_fastmaxsim.integrations.patching.known_sources import defined_in
from pylate_fastmaxsim.integrations.sentence_transformers.padding_free import noise_outside

# Texts and tokens that the check by numbers computes logits of.
_SAMPLE = 2, 16

# Of the largest logit. Both ways make the same calls.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.02}

# Of each model, why not, by what that depends on.
_found: WeakKeyDictionary[nn.Module, dict[Hashable, str | None]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Head:
    """Head of a masked language model: steps from hidden states to hidden states, and the projection to the vocabulary."""

    # Modules around the steps, which are not called.
    holders: tuple[nn.Module, ...]
    # Called one after the other, on hidden states [..., d].
    steps: tuple[Callable[[Tensor], Tensor], ...]
    # Its weight is [V, d].
    decoder: nn.Module

    def __call__(self, hidden: Tensor) -> Tensor:
        for step in self.steps:
            hidden = step(hidden)
        return hidden

    @property
    def modules(self) -> list[nn.Module]:
        return [*self.holders, *(step for step in self.steps if isinstance(step, nn.Module)), self.decoder]


def head_of(model: nn.Module) -> Head | None:
    """The head of a masked language model of transformers, if its structure is a known one."""
    with suppress(AttributeError):  # BERT
        predictions = model.cls.predictions
        return Head((model.cls, predictions), (predictions.transform,), predictions.decoder)
    with suppress(AttributeError):  # DistilBERT
        return Head((), (model.vocab_transform, model.activation, model.vocab_layer_norm), model.vocab_projector)
    with suppress(AttributeError):  # RoBERTa
        head = model.lm_head
        return Head((head,), (head.dense, F.gelu, head.layer_norm), head.decoder)
    with suppress(AttributeError):  # ModernBERT
        return Head((), (model.head,), model.decoder)
    return None


def reason_to_compute_logits(transformer: nn.Module, hidden: HiddenStates, features: dict[str, Tensor]) -> str | None:
    """Reason to run the head of a masked language model as it is; None if its decoder can be left out.

    The ``transformer`` is Sentence Transformers', and ``hidden`` its encoder.
    """
    model = encoder_of(transformer)
    head = head_of(model)
    name = type(model).__name__
    if head is None or not defined_in(type(model).forward, ("transformers",)):
        return f"{name} has no head that is known"
    if type(head.decoder) is not nn.Linear:
        return f"the decoder of {name} is a {torch.typename(type(head.decoder))}"
    for module in (model, *head.modules):
        if getattr(module, "_is_fsdp_managed_module", False):
            return f"FSDP divides the weights of {name}"
        # They are not called as stock calls them, or not called at all.
        if has_hooks(module) or "forward" in vars(module) or module._compiled_call_impl is not None:
            return f"a hook or another forward is on {type(module).__name__}"
    # Also inside of steps, which are given tokens [T, d] for texts [N, L, d]: the check by numbers cannot see that.
    for module in head.holders[:1] or head.modules:
        if (found := user_code(module, backwards=False)) is not None:
            return found
    device = head.decoder.weight.device.type
    situation = (
        *map(ref, (with_adapters(transformer), hidden, *head.modules)),
        head.decoder.weight.dtype,
        torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device),
    )
    found = _found.setdefault(model, {})
    if situation not in found:
        otherwise = f"{name} cannot run in parts ({{}})"
        with torch.compiler.set_stance("force_eager"), trial(torch.device(device), otherwise) as compared:
            _compare_logits(transformer, hidden, head, features)
        found[situation] = compared.reason
    return found[situation]


def _compare_logits(transformer: nn.Module, hidden: HiddenStates, head: Head, features: dict[str, Tensor]) -> None:
    """Raise PackingUnsupported if logits of a few tokens are not those of the model."""
    texts, tokens = _SAMPLE
    sample = {key: value[:texts, :tokens] for key, value in features.items()}
    # Also a bias behind the decoder, which may be 0 now and trained later.
    noise = noise_outside(transformer, hidden, *head.modules[len(head.holders) :])
    with Restoring(transformer), evaluating(transformer), without_user_hooks(transformer):
        expected = functional_call(transformer, noise, dict(sample))["token_embeddings"]
        ours = F.linear(head(hidden(sample)["token_embeddings"]), head.decoder.weight, head.decoder.bias)
    tolerance = _TOLERANCE[expected.dtype] * expected.double().abs().max()
    alike = ours.shape == expected.shape and ours.dtype == expected.dtype
    if not alike or not (ours.double() - expected.double()).abs().max() <= tolerance:
        raise PackingUnsupported(f"{type(encoder_of(transformer)).__name__} gives other logits than its parts")
