"""The documented place of :func:`search`, which :mod:`pylate_fastmaxsim.retrieval.search` defines."""

from pylate_fastmaxsim.retrieval.search import search

__all__ = ["search"]
