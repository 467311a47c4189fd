"""The documented place of :func:`search`, which :mod:`pylate_fastmaxsim.retrieval.search` defines."""

from pylate_fastmaxsim.retrieval.search import SearchResult, search

__all__ = ["SearchResult", "search"]
