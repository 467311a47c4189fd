"""Poolings of a query token's similarities to the tokens of a document, and their definitions in plain PyTorch."""

import numbers
from dataclasses import dataclass

import torch
from torch import Tensor

from pylate_fastmaxsim._checks import require_count


@dataclass(frozen=True)
class Max:
    """The largest similarity: MaxSim."""

    def of(self, similarities: Tensor, live: Tensor) -> Tensor:
        """Similarities ``[..., t]`` pooled over the ``live`` ones, a mask that broadcasts to them; 0 without one."""
        return _or_zero(similarities.masked_fill(~live, -torch.inf).amax(dim=-1), live)


@dataclass(frozen=True)
class TopK:
    """The mean of the ``k`` largest similarities, or of all where a document has fewer live tokens.

    Of equal similarities the lower position comes first.
    """

    k: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "k", require_count("TopK", "k", self.k))

    def of(self, similarities: Tensor, live: Tensor) -> Tensor:
        """Pool as :meth:`Max.of`. Of equal similarities any gets the gradient."""
        best = similarities.masked_fill(~live, -torch.inf).topk(min(self.k, similarities.shape[-1])).values
        return best.masked_fill(best == -torch.inf, 0).sum(dim=-1) / live.sum(dim=-1).clamp(1, self.k)


@dataclass(frozen=True)
class _Tempered:
    temperature: float

    def __post_init__(self) -> None:
        where, value = type(self).__name__, self.temperature
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise TypeError(f"{where}: temperature must be a number from 1e-30 to 1e30, got {value!r}.")
        # Similarities over it must be numbers of float32.
        if not 1e-30 <= value <= 1e30:
            raise ValueError(f"{where}: temperature must be a number from 1e-30 to 1e30, got {value}.")
        object.__setattr__(self, "temperature", float(value))


@dataclass(frozen=True)
class Softmax(_Tempered):
    """The mean of the similarities S with the weights ``softmax(S / temperature)``."""

    def of(self, similarities: Tensor, live: Tensor) -> Tensor:
        """Pool as :meth:`Max.of`."""
        weights = _tempered(similarities, live, self.temperature).softmax(dim=-1)
        return _or_zero((weights * similarities).sum(dim=-1), live)


@dataclass(frozen=True)
class LogSumExp(_Tempered):
    """``temperature * log sum exp(S / temperature)`` of the similarities S: colpali-engine's smooth maximum."""

    def of(self, similarities: Tensor, live: Tensor) -> Tensor:
        """Pool as :meth:`Max.of`."""
        logs = _tempered(similarities, live, self.temperature).logsumexp(dim=-1)
        return _or_zero(self.temperature * logs, live)


Pooling = Max | TopK | Softmax | LogSumExp


def check_pooling(where: str, pooling: object) -> None:
    """Raise TypeError unless ``pooling`` is one; ``where`` is the name in the error."""
    if not isinstance(pooling, Pooling):
        raise TypeError(f"{where}: pooling must be Max(), TopK(k), Softmax(t) or LogSumExp(t), got {pooling!r}.")


def _tempered(similarities: Tensor, live: Tensor, temperature: float) -> Tensor:
    """Similarities over the temperature, -inf where masked. Of a document without a live token none is masked."""
    empty = ~live.any(dim=-1, keepdim=True)  # a softmax of -inf alone would pass NaN into gradients
    return (similarities / temperature).masked_fill(~(live | empty), -torch.inf)


def _or_zero(pooled: Tensor, live: Tensor) -> Tensor:
    return pooled.masked_fill(~live.any(dim=-1), 0)
