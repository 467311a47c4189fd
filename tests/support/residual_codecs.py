"""Residual codecs and unit vectors without training."""

import torch
import torch.nn.functional as F
from torch import Tensor

from pylate_fastmaxsim import ResidualCodec


def unit_vectors(count: int, dim: int, seed: int = 0) -> Tensor:
    return F.normalize(torch.randn(count, dim, generator=torch.Generator().manual_seed(seed)), dim=-1)


def random_codec(dim: int, bits: int, centroids: int = 9, seed: int = 0) -> ResidualCodec:
    cutoffs = torch.linspace(-0.3, 0.3, 2**bits + 1)
    weights = (cutoffs[:-1] + cutoffs[1:]) / 2
    return ResidualCodec(unit_vectors(centroids, dim, seed).half(), weights.half(), cutoffs[1:-1].contiguous())
