"""Indexes with the interface of ``pylate.indexes``."""

from pylate_fastmaxsim.indexes.exact import Exact

__all__ = ["Exact"]
