"""Robustness as tables for the terminal, as a picture, and as a page with heat maps of a few pairs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pylate_fastmaxsim.diagnostics.injection import EVERYWHERE, PARTIAL, RANDOM, SPIKE, TARGETED
from pylate_fastmaxsim.diagnostics.robustness import RECALLS
from pylate_fastmaxsim.recipes.robustness.measure import COMPARED, Pair
from pylate_fastmaxsim.reporting.figures import hide_frame, write_png
from pylate_fastmaxsim.reporting.numbers import METRICS, format_number
from pylate_fastmaxsim.reporting.page import Section, write_page
from pylate_fastmaxsim.reporting.table import Rows, Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ATTACKS = {
    TARGETED: "near query tokens",
    PARTIAL: "near half of the query's tokens",
    SPIKE: "near several query tokens at once",
    RANDOM: "random unit vectors",
    EVERYWHERE: "near query tokens, in gold documents too",
}
RECALLS_TITLE = " / ".join(f"Recall@{k}" for k in RECALLS)
TEST = "p of Student's paired t-test against the first pooling, corrected for all pairs (Holm)"
SHOWN_METRICS = ("ndcg@10", "recall@1")
BOTH_METRICS = "{ndcg@10:.3f} / {recall@1:.3f}"
SETTINGS = ("data", "appended", "document_length", "lengthened_document_length", "noise", "seed", "poolings")
MOST_LETTERS = 300  # of a text of a pair
MOST_LABELS = 48  # tokens of a query that still have room for their names
PAGE_PIXELS = 400  # of the longer side of a page in the report
WINNER = "#d9480f"


def tables(result: dict[str, Any]) -> list[Table]:
    """One table for the lengths, one for each attack, what is retained, and the poolings against the first."""
    title = f"{name_of(result)}: nDCG@10 / Recall@1 against document length"
    shown = [Table(title, length_rows(result), caption(result), left=0)]
    for attack, title in attacks_of(result).items():
        shown.append(Table(f"with injected tokens: {title}", injection_rows(result, attack), left=0))
    shown.append(Table(f"{RECALLS_TITLE} retained", retained_rows(result)))
    if result["pairs"]:
        shown.append(Table(f"means over {result['queries']:,} queries, and {TEST}", compared_rows(result)))
    return shown


def length_rows(result: dict[str, Any]) -> Rows:
    """nDCG@10 and Recall@1 of each length and pooling; the first row is the header."""
    columns = {"times as long": "{times}", "tokens": "{tokens:.0f}"}
    return _rows(result, result["lengths"], "times", columns, BOTH_METRICS)


def injection_rows(result: dict[str, Any], attack: str) -> Rows:
    """nDCG@10 and Recall@1 of each number of injected tokens and pooling, and the hijack rate."""
    columns = {"tokens": "{tokens}", "hijack rate": "{hijack_rate:.3f}"}
    return _rows(result, _of(result, attack), "tokens", columns, BOTH_METRICS)


def retained_rows(result: dict[str, Any]) -> Rows:
    """The shares of Recall@k that are left of the longest documents, and with the most tokens of each attack."""
    settings = {"{times} times as long": result["lengths"]}
    settings |= {f"{{tokens}} tokens: {title}": _of(result, attack) for attack, title in attacks_of(result).items()}
    table: list[tuple[str, ...]] = [("", *result["poolings"])]
    for name, rows in settings.items():
        last = rows[-len(result["poolings"]) :]
        shares = ([row["retained"][f"recall@{k}"] for k in RECALLS] for row in last)
        cells = (" / ".join(format_number("{:.0%}", share) for share in some) for some in shares)
        table.append((name.format_map(last[0]), *cells))
    return table


def compared_rows(result: dict[str, Any]) -> Rows:
    """The means of each pooling, and p of their differences from the first pooling."""
    first = result["poolings"][0]
    p_values = {(*row["models"], row["metric"]): row["corrected_p"] for row in result["pairs"]}
    table: list[tuple[str, ...]] = [("", *(cell for metric in COMPARED for cell in (METRICS[metric], "p")))]
    for pooling in result["poolings"]:
        row = [pooling]
        for metric in COMPARED:
            values = result["by_query"][pooling][metric].values()
            p = p_values.get((first, pooling, metric))
            row += [f"{sum(values) / len(values):.3f}", "" if p is None else f"{p:.3f}" if p >= 0.001 else "< 0.001"]
        table.append(tuple(row))
    return table


def _rows(result: dict[str, Any], rows: list[dict[str, Any]], key: str, columns: dict[str, str], cell: str) -> Rows:
    """A row for each value of ``key``: ``columns`` by their titles, and a ``cell`` for each pooling."""
    table = [(*columns, *result["poolings"])]
    for value in dict.fromkeys(row[key] for row in rows):
        some = [row for row in rows if row[key] == value]
        table.append((*(text.format_map(some[0]) for text in columns.values()), *map(cell.format_map, some)))
    return table


def attacks_of(result: dict[str, Any]) -> dict[str, str]:
    """The titles of the attacks that were measured: none of a model without token embeddings."""
    return ATTACKS if result["injection"] else {}


def name_of(result: dict[str, Any]) -> str:
    """The recipe or the model that was measured."""
    return result["recipe"] or result["model"]


def caption(result: dict[str, Any]) -> str:
    """Sentences on the data, how documents were made longer, and whether they were cut."""
    how = {
        "text": "Words of other documents are appended and read with the document",
        "tokens": "Token embeddings of other documents are appended",
    }[result["appended"]]
    limit, longest = result["lengthened_document_length"], max(row["times"] for row in result["lengths"])
    lifted = (
        "" if limit is None or longest == 1 else f", up to {limit:,} tokens in place of {result['document_length']:,}"
    )
    cut = max((row["cut"] for row in result["lengths"]), default=0)
    were_cut = f" {cut:,} of the longest documents were cut there." if cut else ""
    attacked = "" if result["injection"] else f" Nothing is injected: a {result['kind']} model has no token embeddings."
    return (
        f"{result['queries']:,} queries, {result['documents']:,} {'pages' if result['of_pages'] else 'documents'} of "
        f"{result['data']}. {how}{lifted}.{were_cut}"
        f"{attacked} It took {result['seconds']:.0f} s."
    )


def _of(result: dict[str, Any], attack: str) -> list[dict[str, Any]]:
    return [row for row in result["injection"] if row["attack"] == attack]


def write_robustness_png(result: dict[str, Any], file: Path) -> None:
    """Draw nDCG@10 and Recall@1 against length, and against the tokens of each attack."""
    write_png(file, partial(_draw_overview, result), f"{name_of(result)}: robustness", 15, 6, dpi=130)


def write_robustness_page(result: dict[str, Any], pairs: Sequence[Pair], file: Path) -> None:
    """Write the page of the content of ``robustness.json`` and a few pairs."""
    name = name_of(result)
    write_page(
        file,
        title=f"{name}: robustness",
        name=name,
        headline=f"How retrieval holds up with longer and with attacked documents, by {len(result['poolings'])} poolings",
        sections=[*_sections(result), *map(_pair_section, pairs)],
        environment=result["environment"],
        settings=("Settings", {key: result[key] for key in SETTINGS}),
    )


def _sections(result: dict[str, Any]) -> list[Section]:
    attacked = (
        "Documents that are not gold for a query carry that many tokens more in its ranking. nDCG@10 / Recall@1. The hijack "
        "rate is the share of query tokens, over all pairs with such documents, whose most similar token is injected."
    )
    sections = [
        Section("Overview", caption(result), draw=partial(_draw_overview, result), size=(12, 5.5)),
        Section("Longer documents", "nDCG@10 / Recall@1.", length_rows(result)),
    ]
    for attack, title in attacks_of(result).items():
        sections.append(Section(f"Injected tokens: {title}", attacked, injection_rows(result, attack)))
    if result["injection"]:
        weights = (
            "The share of each pooling's weight that is on injected tokens; the table is of tokens near query tokens."
        )
        rows = _rows(result, _of(result, TARGETED), "tokens", {"tokens": "{tokens}"}, "{injected_weight:.3f}")
        sections.append(Section("What is hijacked", weights, rows))
    sections.append(Section("What is retained", f"The share of {RECALLS_TITLE} that is left.", retained_rows(result)))
    if result["pairs"]:
        gradients = (
            "The Gini coefficient is that of the gradient of a query's score with its gold document, by the document's "
            f"tokens: 0 where all have the same, 1 where one has everything. Means over queries, and {TEST}."
        )
        sections.append(Section("Concentration of gradients", gradients, compared_rows(result)))
    return sections


def _pair_section(pair: Pair) -> Section:
    query, document = (
        text if len(text) <= MOST_LETTERS else f"{text[:MOST_LETTERS]}..." for text in (pair.query, pair.document)
    )
    count = next(iter(pair.injected.values())).shape[1]
    note = (
        f"The best document that is not gold, before and after {count} injected tokens; a dot is the most similar token of a "
        f"query token. {document}"
    )
    draw = _draw_heat_maps if pair.page is None else _draw_page
    return Section(f"Query: {query}", note, draw=partial(draw, pair), size=(13, 4.5))


def _draw_overview(result: dict[str, Any], figure: Figure) -> None:
    """A row for each metric, a column for the lengths and for each attack."""
    attacks = attacks_of(result)
    axes = figure.subplots(len(SHOWN_METRICS), 1 + len(attacks), sharey="row", sharex="col", squeeze=False)
    for row, metric in zip(axes, SHOWN_METRICS, strict=True):
        _draw_lines(row[0], result, result["lengths"], "times", metric)
        for one, attack in zip(row[1:], attacks, strict=True):
            _draw_lines(one, result, _of(result, attack), "tokens", metric)
        row[0].set_ylabel(METRICS[metric])
        row[0].set_ylim(bottom=0)
    axes[0, 0].set_title("longer documents", fontsize=10)
    axes[-1, 0].set_xlabel("times as long")
    for place, title in enumerate(attacks.values(), start=1):
        axes[0, place].set_title(title.replace(", ", ",\n"), fontsize=10)
        axes[-1, place].set_xlabel("injected tokens")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=6, frameon=False)


def _titled(pair: Pair) -> list[tuple[str, Tensor]]:
    """Titles, and similarities of the tokens of the document and of injected ones, before and after each attack."""
    shown = [("before", pair.similarities)]
    for attack, injected in pair.injected.items():
        hijacked = int((injected.amax(dim=1) > pair.similarities.amax(dim=1)).sum()) if injected.numel() else 0
        title = f"{ATTACKS[attack]}\n{hijacked} of {len(injected)} query tokens hijacked"
        shown.append((title, torch.cat((pair.similarities, injected), dim=1)))
    return shown


def _draw_heat_maps(pair: Pair, figure: Figure) -> None:
    """Similarities of a pair before and after each attack; a dot marks the winner of each query token."""
    shown, own = _titled(pair), pair.similarities.shape[1]
    lowest, highest = (float(getattr(torch.cat([part for _, part in shown], 1), name)()) for name in ("min", "max"))
    panels = figure.subplots(1, len(shown), sharey=True, width_ratios=[part.shape[1] for _, part in shown])
    for axes, (title, values) in zip(panels, shown, strict=True):
        image = axes.imshow(
            values.numpy(), aspect="auto", interpolation="nearest", cmap="viridis", vmin=lowest, vmax=highest
        )
        axes.plot(values.argmax(dim=1), range(len(values)), "o", color=WINNER, markersize=3)
        axes.set_title(title, fontsize=9)
        axes.set_xlabel("document token")
        if values.shape[1] > own:
            axes.axvline(own - 0.5, color="white", linewidth=1.5)
    if len(pair.query_tokens) == len(pair.similarities) <= MOST_LABELS:
        panels[0].set_yticks(range(len(pair.query_tokens)), pair.query_tokens, fontsize=6)
        for label in panels[0].get_yticklabels():
            label.set_parse_math(False)
    figure.colorbar(image, ax=panels[-1], label="similarity")


def _draw_page(pair: Pair, figure: Figure) -> None:
    """The largest similarity of each patch of a page, before and after each attack; injected tokens stand below.

    A dot marks each token that wins for a query token, larger if it wins for more.
    """
    shown, (rows, columns) = _titled(pair), pair.patches.shape
    best = [values.amax(dim=0) for _, values in shown]
    lowest, highest = (float(getattr(torch.cat(best), name)()) for name in ("min", "max"))
    page = pair.page.convert("L")
    page.thumbnail((PAGE_PIXELS, PAGE_PIXELS))
    colours = {"cmap": "viridis", "vmin": lowest, "vmax": highest}
    panels = figure.subplots(2, len(shown), height_ratios=[12, 1], squeeze=False)
    for (axes, strip), (title, values), largest in zip(panels.T, shown, best, strict=True):
        wins = values.argmax(dim=1).bincount(minlength=values.shape[1])
        axes.imshow(page, cmap="gray", extent=(-0.5, columns - 0.5, rows - 0.5, -0.5), aspect="auto")
        image = axes.imshow(largest[pair.patches].numpy(), alpha=0.7, aspect="auto", **colours)
        _draw_wins(axes, wins[pair.patches])
        axes.set_title(title, fontsize=9)
        axes.set_axis_off()
        strip.set_axis_off()
        if injected := values.shape[1] - pair.similarities.shape[1]:
            strip.imshow(largest[None, -injected:].numpy(), aspect="auto", **colours)
            _draw_wins(strip, wins[None, -injected:])
    figure.colorbar(image, ax=panels[:, -1], label="similarity")


def _draw_wins(axes: Axes, wins: Tensor) -> None:
    places = wins.nonzero()
    axes.scatter(places[:, 1], places[:, 0], s=12 * wins[wins > 0], color=WINNER)


def _draw_lines(axes: Axes, result: dict[str, Any], rows: list[dict[str, Any]], x: str, y: str) -> None:
    for pooling in result["poolings"]:
        some = [row for row in rows if row["pooling"] == pooling]
        axes.plot([row[x] for row in some], [row[y] for row in some], "o-", markersize=4, label=pooling)
    axes.set_xticks(list(dict.fromkeys(row[x] for row in rows)))
    axes.tick_params(axis="x", labelsize=8)
    hide_frame(axes)
