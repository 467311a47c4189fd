"""Numbers as text and as JSON has them, and the titles of metrics."""

import json
from typing import Any

GIBIBYTE = 2**30
MEBIBYTE = 2**20

METRICS = {
    "ndcg@10": "nDCG@10",
    "mrr@10": "MRR@10",
    "recall@1": "Recall@1",
    "recall@5": "Recall@5",
    "recall@10": "Recall@10",
    "recall@100": "Recall@100",
    "recall@1000": "Recall@1000",
    "gini": "Gini coefficient",
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


def without_nan(value: Any) -> Any:
    """A value as it is after JSON, with None for each number that is NaN or infinite, which JSON does not have."""
    return json.loads(json.dumps(value), parse_constant=lambda name: None)
