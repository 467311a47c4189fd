"""Columns of texts for Sentence Transformers' MultiVectorEncoder: the same as for its SparseEncoder."""

from __future__ import annotations

from pylate_fastmaxsim.recipes.data.sparse import check_columns

__all__ = ["check_columns"]
