"""MaxSim's kernels as one path: scores and winners, and the gradients of these winners."""

from pylate_fastmaxsim.kernels.maxsim.launch import forward
from pylate_fastmaxsim.kernels.winner_backward.launch import backward

__all__ = ["backward", "forward"]
