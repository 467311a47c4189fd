"""Results of commands as tables for the terminal."""

from typing import Any

from pylate_fastmaxsim.recipes.search.run import (
    ENCODE_DOCUMENTS,
    ENCODE_QUERIES,
    ENCODE_SAMPLE,
    FIRST_STAGE,
    INDEX,
    PRUNED,
    SEARCH,
)
from pylate_fastmaxsim.reporting.numbers import METRICS, format_number
from pylate_fastmaxsim.reporting.table import Rows, Table

NAMES_OF_TESTS = {"student": "Student's paired t-test", "fisher": "Fisher's randomisation test"}


def begun_table(summary: dict[str, Any]) -> Table:
    rows = "streamed" if summary["rows"] is None else f"{summary['rows']:,}"
    held_out = "" if summary["held_out"] is None else f", {summary['held_out']:,} to evaluate on"
    empty = f", {summary['empty']:,} with an empty text" if summary["empty"] else ""
    begin = f"{summary['step']:,} to " if summary["step"] else ""
    return Table(
        f"{summary['recipe']}: training",
        [
            ("rows", f"{rows}{held_out}{empty}"),
            ("steps", f"{begin}{summary['steps']:,}, of {summary['batch']:,} rows"),
            ("precision", f"{summary['precision']} on {summary['device']}"),
            ("pylate-fastmaxsim", "on" if summary["fast"] else "off"),
            ("logs to", ", ".join(summary["report_to"]) or "the terminal"),
        ],
        header=False,
        left=2,
    )


def training_table(result: dict[str, Any]) -> Table:
    """The content of ``train.json``."""
    resumed = f" (resumed from {result['resumed_from']})" if result["resumed_from"] else ""
    rows = [("steps", f"{result['steps']}{resumed}")]
    if losses := result["losses"]:
        rows.append(("logged loss, first to last", f"{losses[0][1]:.4f} to {losses[-1][1]:.4f}"))
    if (seconds := result["seconds"]) is not None:
        rows.append(("time", f"{seconds:,.1f} s, {result['rows_per_second']:,.0f} rows/s"))
    before = result["before"] or {}
    for key, title in METRICS.items():
        if key in result:
            first = f"{format_number('{:.4f}', before[key])} to " if key in before else ""
            rows.append((title, first + format_number("{:.4f}", result[key])))
    fast = result["fast"]
    mode = f" ({fast['mode']})" if fast["mode"] else ""
    rows.append(("pylate-fastmaxsim", f"on{mode}" if fast["enabled"] else f"off ({fast['why_off']})"))
    rows += [(title, result[key]) for title, key in (("model", "model"), ("pushed to", "pushed_to")) if result[key]]
    return Table(f"{result['recipe']}: trained", rows, header=False, left=2)


def mining_table(result: dict[str, Any]) -> Table:
    rows = [(name, f"{result[name]:,}") for name in ("queries", "documents", "rows")]
    rows.append(("pairs without enough negatives", f"{result['left_out']:,}"))
    rows.append(("data", result["data"]))
    return Table("mined", rows, header=False, left=2)


def search_table(result: dict[str, Any]) -> Table:
    """A collection that was searched: the seconds of each task and the rate of it, and metrics."""
    rows = [
        ("model", result["kind"]),
        ("documents", f"{result['documents']:,}"),
        ("queries", f"{result['queries']:,}"),
    ]
    for task, count, unit in (
        (ENCODE_QUERIES, result["queries"], "queries"),
        (ENCODE_SAMPLE, None, ""),
        (FIRST_STAGE, None, ""),
        (ENCODE_DOCUMENTS, result["encoded_documents"], "documents"),
        (INDEX, None, ""),
        (SEARCH, result["queries"], "queries"),
        (PRUNED, result["queries"], "queries"),
    ):
        if (seconds := result["seconds"].get(task)) is not None:
            rate = f", {count / seconds:,.0f} {unit}/s" if count else ""
            rows.append((task, f"{seconds:.1f} s{rate}"))
    rows += [(METRICS[name], f"{value:.4f}") for name, value in (result["metrics"] or {}).items()]
    rows += _plaid_rows(result["plaid"] or {})
    rows += [(name, result[name]) for name in ("index", "run") if result[name] is not None]
    return Table(f"{result['model']}: searched", rows, header=False)


def _plaid_rows(plaid: dict[str, Any]) -> Rows:
    """The part of the exhaustive ranking of an index of PLAID that its own search finds."""
    rows = []
    if "not_searched" in plaid:
        rows.append((PRUNED, f"not measured: {plaid['not_searched']}"))
    shares = [
        f"{value:.1%} of the top {name.removeprefix('overlap@')}"
        for name, value in plaid.items()
        if name.startswith("overlap@")
    ]
    if shares:
        rows.append((f"{PRUNED} finds", ", ".join(shares)))
    metrics = (plaid.get("metrics") or {}).items()
    return [*rows, *((f"{METRICS[name]} of {PRUNED}", f"{value:.4f}") for name, value in metrics)]


def metrics_table(result: dict[str, Any]) -> Table:
    metrics = list(result["models"][0]["metrics"])
    # Of the best of an exhaustive search, what share is found behind a first stage.
    shares = dict.fromkeys(name for model in result["models"] for name in model if name.startswith("overlap@"))
    found = [f"of the top {name.removeprefix('overlap@')}" for name in shares]
    pooled = any(model["pool_factor"] > 1 for model in result["models"])
    names = (METRICS[name] for name in metrics)
    rows = [("model", *(["vectors"] if pooled else []), *names, *found, "encode", "search")]
    for model in result["models"]:
        encoding = model["seconds"].get(ENCODE_DOCUMENTS)
        rows.append(
            (
                model["label"],
                *([f"{model['vectors'] or 0:,}"] if pooled else []),
                *(f"{model['metrics'][name]:.4f}" for name in metrics),
                *(f"{model[name]:.1%}" if name in model else "" for name in shares),
                "kept" if encoding is None else f"{encoding:.1f} s",
                f"{model['seconds'][SEARCH]:.1f} s",
            )
        )
    return Table(f"{result['collection']}: {result['documents']:,} documents, {result['queries']:,} queries", rows)


def pairs_table(result: dict[str, Any]) -> Table:
    """The difference of each two models by each metric, its p, and the queries for which it is positive or negative."""
    # Rows come by metric.
    pairs = list(dict.fromkeys(tuple(row["models"]) for row in result["pairs"]))
    rows = [("models", "metric", "difference", "p", "better", "equal", "worse")]
    for first, second in pairs:
        names = f"{second} against {first}"
        for row in result["pairs"]:
            if row["models"] == [first, second]:
                p = f"{row['corrected_p']:.3f}" if row["corrected_p"] >= 0.001 else "< 0.001"
                counts = (str(row[name]) for name in ("better", "equal", "worse"))
                rows.append((names, METRICS[row["metric"]], f"{row['difference']:+.4f}", p, *counts))
                names = ""
    corrected = f", p corrected for {len(pairs)} pairs (Holm)" if len(pairs) > 1 else ""
    title = f"{NAMES_OF_TESTS[result['test']]} over {result['queries']:,} queries{corrected}"
    return Table(title, rows, left=2)
