"""Numbers as text, and the titles of metrics."""

from __future__ import annotations

GIBIBYTE = 2**30
MEBIBYTE = 2**20

METRICS = {
    "ndcg@10": "nDCG@10",
    "mrr@10": "MRR@10",
    "recall@1": "Recall@1",
    "recall@100": "Recall@100",
    "recall@1000": "Recall@1000",
    "accuracy": "Triplet accuracy",
    "kl_divergence": "KL divergence",
    "flops": "FLOPS",
    "query_nonzeros": "Non-zeros of a query",
    "document_nonzeros": "Non-zeros of a document",
}


def format_number(pattern: str, value: float | None) -> str:
    """A number as text, or a dash for None."""
    return "-" if value is None else pattern.format(value)


def format_bytes(value: int | None) -> str:
    """Bytes as MiB, or as GiB from 10 GiB on; a dash for None."""
    if value is None:
        return "-"
    return f"{value / GIBIBYTE:.1f} GiB" if value >= 10 * GIBIBYTE else f"{value / MEBIBYTE:,.0f} MiB"
