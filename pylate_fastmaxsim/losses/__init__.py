"""Losses that neither host has, and the encoding for a loss of one's own."""

from pylate_fastmaxsim.losses.contrastive_distillation import ContrastiveDistillation
from pylate_fastmaxsim.losses.matryoshka import Matryoshka
from pylate_fastmaxsim.losses.pooled_contrastive import PooledContrastive

__all__ = ["ContrastiveDistillation", "Matryoshka", "PooledContrastive"]
