"""Unit token embeddings straight from the last Dense module of a PyLate model: projection and normalisation in one.

The module does it itself, when a loss asks for it: inside the forward of whatever wraps the model, so that its weight
is there and its gradient arrives under DistributedDataParallel and FSDP as it does for stock PyLate.
"""

from dataclasses import dataclass
from functools import wraps

import torch
from pylate.models import Dense
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel
from torch.utils import _pytree

from pylate_fastmaxsim.integrations.encoding.masks import MasksChanged, changed, masks_of, masks_unread
from pylate_fastmaxsim.integrations.encoding.plans import unit
from pylate_fastmaxsim.integrations.log import log_once
from pylate_fastmaxsim.integrations.models.user_code import (
    custom_module,
    has_global_hooks,
    has_hooks,
    reason_in_calls,
    user_wrapper,
)
from pylate_fastmaxsim.integrations.models.wrappers import (
    is_compiled,
    layers_of_wrapping,
    sharded_by_deepspeed,
    unsharded,
    unwrap,
)
from pylate_fastmaxsim.integrations.options import current_options
from pylate_fastmaxsim.integrations.patching.known_sources import LIBRARIES, defined_in
from pylate_fastmaxsim.integrations.patching.patches import Patch
from pylate_fastmaxsim.ops.projection import project_normalize

# In the features: which module is asked for unit embeddings, by its id, and the answer.
_ASKED = "unit_embeddings_asked"
_UNIT = "unit_embeddings"


@dataclass(frozen=True)
class UnitEmbeddings:
    """The answer of the last module.

    A box, because accelerate makes every half-precision tensor of a model's output float32, which would double the
    bytes of the embeddings and cost scoring its fast matrix products. FSDP and DistributedDataParallel look inside.
    """

    values: Tensor


_pytree.register_pytree_node(
    UnitEmbeddings, lambda box: ([box.values], None), lambda values, _context: UnitEmbeddings(*values)
)


def patches() -> list[Patch]:
    """Replacements in PyLate."""
    return [Patch(Dense, "forward", project)]


@wraps(Dense.forward)
def project(self: Dense, features: dict[str, Tensor]) -> dict[str, Tensor]:
    """PyLate's own, and unit embeddings for whoever asks for them."""
    if torch.compiler.is_compiling() or features.get(_ASKED) != id(self):
        return project.__wrapped__(self, features)
    embeddings = project_normalize(features["token_embeddings"], self.linear.weight, self.linear.bias)
    features["token_embeddings"] = embeddings
    features[_UNIT] = UnitEmbeddings(embeddings)
    return features


def unit_embeddings(model: nn.Module, features: dict[str, Tensor], masks_stay: bool = False) -> Tensor:
    """Token embeddings of length 1, ``[N, L, d]``, of one call of a ColBERT, possibly wrapped.

    Where the head is fused they have the dtype that the encoder computes in, else that of the model's output. Features
    are not changed but, if ``masks_stay``, by what modules left beside token embeddings: the caller goes on with ids and
    masks as they were, and gets MasksChanged if the model changes them.
    """
    head = _head(model)
    given = {**features, **({} if head is None else {_ASKED: id(head)})}
    before = masks_of(given)
    with masks_unread():
        output = model(given)
    if masks_stay and changed(given, before):
        raise MasksChanged(output["token_embeddings"].shape[-1])
    if masks_stay:
        left = given.keys() - features.keys() - {_ASKED, _UNIT, "token_embeddings"}
        features.update((key, given[key]) for key in left)
    made = output.get(_UNIT)
    return unit(output["token_embeddings"]) if made is None else made.values


def _head(model: nn.Module) -> Dense | None:
    """The module to ask, or None, with a line of log, where projection and normalisation stay apart."""
    if current_options() is None:
        return None
    core = unsharded(unwrap(model))
    last = unsharded(core[-1]) if isinstance(core, nn.Sequential) else core
    reason = _reason_to_leave(model, core, last)
    if reason is None:
        return last
    log_once("The head is not fused, Dense and normalisation run one after the other: %s.", reason, about=unwrap(model))
    return None


def _reason_to_leave(model: nn.Module, core: nn.Module, last: nn.Module) -> str | None:
    if torch.compiler.is_compiling():
        return "torch.compile compiles the loss"
    if is_compiled(model):
        return "torch.compile compiles the model as a whole"
    around = layers_of_wrapping(model)[:-1]
    if any(isinstance(layer, DataParallel) for layer in around):
        return "DataParallel cannot gather what the Dense module answers"
    if type(last).forward is not project:
        return f"the model ends with {type(last).__name__}, not with PyLate's Dense"
    # FSDP 2 has made the weight whole by the time the module runs.
    whole = (nn.Parameter, Tensor, DTensor) if isinstance(unwrap(model), FSDPModule) else (nn.Parameter, Tensor)
    activation, linear = last.activation_function, last.linear
    if last.use_residual or type(activation) is not nn.Identity or "forward" in vars(activation):
        return "Dense has an activation or a residual"
    if type(linear) is not nn.Linear or type(linear.weight) not in whole or sharded_by_deepspeed(linear):
        return "the linear layer of Dense is not PyTorch's, or has no whole weight, as in DeepSpeed (ZeRO 3)"
    has_other_calls = has_hooks(linear) or has_global_hooks() or "forward" in vars(linear)
    if has_other_calls or not defined_in(nn.Linear.forward, LIBRARIES):
        return "a hook or another forward is on the linear layer of Dense"
    if (reason := reason_in_calls([*around, core, *map(unsharded, core.children())])) is not None:
        return reason
    if (module := user_wrapper(model) or custom_module(core)) is not None:
        return f"{type(module).__name__} may change what the model is given or returns"
    return None
