"""The documented place of :class:`Corpus`, which :mod:`pylate_fastmaxsim.retrieval.corpus` defines."""

from pylate_fastmaxsim.retrieval.corpus import TOKENS_PER_BATCH, Corpus, write_corpus

__all__ = ["TOKENS_PER_BATCH", "Corpus", "write_corpus"]
