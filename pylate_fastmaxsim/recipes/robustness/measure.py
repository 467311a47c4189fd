"""Measure the robustness of the model of a recipe, or of a model on a collection: longer documents and injected tokens."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pylate_fastmaxsim.diagnostics.injection import RANDOM, SPIKE, TARGETED, injected_tokens, injection_sweep
from pylate_fastmaxsim.diagnostics.robustness import DEPTH, RECALLS, length_sweep, retrieval_metrics, values_by_query
from pylate_fastmaxsim.files.replace import write_json
from pylate_fastmaxsim.integrations.options import POOLINGS
from pylate_fastmaxsim.ops.pooled import pooled_scores
from pylate_fastmaxsim.pooling import LogSumExp, Max, Pooling, Softmax, TopK
from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.files import inputs_of, prepare_file
from pylate_fastmaxsim.recipes.load import is_recipe
from pylate_fastmaxsim.recipes.models.retriever import DenseRetriever, Encoded, NotFiniteError, Retriever, retriever_of
from pylate_fastmaxsim.recipes.robustness.lengthen import Lengthened, encode
from pylate_fastmaxsim.recipes.robustness.task import Settings, Task, collection_task, trained_on
from pylate_fastmaxsim.recipes.search.run import best_device
from pylate_fastmaxsim.recipes.search.significance import compare
from pylate_fastmaxsim.recipes.targets import find_collection, find_targets
from pylate_fastmaxsim.reporting.environment import environment
from pylate_fastmaxsim.reporting.numbers import without_nan
from pylate_fastmaxsim.retrieval.static.tokens import TokenIds
from pylate_fastmaxsim.tokens import TokenBatch

if TYPE_CHECKING:
    from PIL.Image import Image

DEFAULT_POOLINGS = (Max(), TopK(4), Softmax(0.1), LogSumExp(0.1))
PAIRS = 3
ATTACKS_OF_PAIRS = (TARGETED, SPIKE, RANDOM)
METRICS = ("ndcg@10", *(f"recall@{k}" for k in RECALLS))
COMPARED = ("gini", "ndcg@10", "recall@1")  # by the paired test
RESULT_FILE = "robustness.json"


@dataclass(frozen=True)
class Pair:
    """A query and a document that is not gold for it, and tokens that are injected into it."""

    query: str
    document: str  # its text, or the number of the page
    query_tokens: list[str]
    similarities: Tensor  # [Lq, Ld]
    injected: dict[str, Tensor]  # similarities with the tokens of each attack, [Lq, K]
    page: Image | None = None
    patches: Tensor | None = None  # of the page: where their tokens are among the Ld, [rows, columns]


def pooling_text(pooling: Pooling) -> str:
    """A pooling as the command line names it."""
    (name,) = (name for name, each in POOLINGS.items() if isinstance(pooling, each))
    return "=".join([name, *map(str, vars(pooling).values())])


def robustness(
    name: str,
    settings: Settings,
    overrides: Sequence[str] = (),
    beir: str | None = None,
    split: str = "test",
    output: str | None = None,
) -> tuple[dict[str, Any], list[Pair], Path]:
    """Measure a trained model, and write ``robustness.json``.

    ``name`` is a recipe whose model was trained before, of texts or of pages, or a model of texts, which needs a collection
    in BEIR's layout (``beir``). The pooling of a recipe is measured in any case. Results go to ``output``, to the recipe's
    ``output_dir``, or for a model to the working directory.

    Returns
    -------
    The content of ``robustness.json``, pairs to look at, and that file.
    """
    if beir is None and not is_recipe(name):
        raise RecipeError(
            f"{name} needs held-out data: name a collection in BEIR's layout with --beir, or give the recipe of the model."
        )
    (target,) = find_targets([name], overrides)
    recipe, directory, inputs = target.recipe, Path(), [Path(target.path).expanduser()]
    if recipe is not None:
        directory = Path(recipe.output_dir)
        inputs += inputs_of(recipe.model, recipe.data, recipe.evaluation)
    if beir is not None:
        inputs.append(Path(beir).expanduser())
    if output is not None:
        directory = Path(output).expanduser()
    for suffix in (".json", ".png", ".html"):
        prepare_file("--output", (directory / RESULT_FILE).with_suffix(suffix), inputs)
    data, collection, rows = find_collection([target], beir, split)
    fillers = None if rows is None else trained_on(rows, collection, settings)
    task = collection_task(data, collection, settings, fillers)
    retriever = retriever_of(target.load(best_device(), trust_remote_code=False), finite=True)
    if isinstance(retriever, DenseRetriever):
        raise RecipeError(
            f"{target.label} has one vector a text; fastmaxsim robustness measures models of token vectors."
        )
    own = None if recipe is None else target.pooling
    measured, pairs = measure(retriever, task, settings, target.batch_size, own)
    names = {"model": target.path, "recipe": None if recipe is None else recipe.name}
    result = without_nan(names | measured)
    write_json(directory / RESULT_FILE, result)
    return result, pairs, directory / RESULT_FILE


def measure(
    retriever: Retriever, task: Task, settings: Settings, batch_size: int, own_pooling: Pooling | None = None
) -> tuple[dict[str, Any], list[Pair]]:
    """The content of ``robustness.json`` but the names of model and recipe, and a few pairs to look at.

    ``own_pooling`` is that of the model, which comes first. Of a sparse or static model, which has no token embeddings,
    longer documents are measured alone.
    """
    begun = time.perf_counter()
    has_tokens = retriever.has_token_embeddings
    poolings = _poolings(settings, own_pooling, has_tokens)
    # What is retained is so of documents as they are.
    times, tokens = sorted({1, *settings.times}), sorted({0, *settings.tokens})
    try:
        queries = encode(retriever, [*task.queries.values()], batch_size, is_query=True)
        documents = encode(retriever, task.documents, batch_size, is_query=False)
        longer = Lengthened(retriever, task, documents, times, settings.append, batch_size, settings.seed)
        if has_tokens:
            grades = task.grades.to(documents.device)
            lengths = length_sweep(queries, longer, grades, poolings)
        else:
            lengths = vector_length_sweep(retriever, queries, longer, task.grades)
    except NotFiniteError:
        raise RecipeError(
            "the model must give finite embeddings, but some are NaN or infinite, as after a training that diverged."
        ) from None
    attacked, by_query, pairs = [], {}, []
    if has_tokens:
        attacked = injection_sweep(queries, documents, grades, poolings, tokens, settings.noise, settings.seed)
        for pooling in poolings:
            values = values_by_query(queries, documents, grades, pooling)
            by_query[pooling_text(pooling)] = {
                name: dict(zip(task.queries, column, strict=True)) for name, column in values.items()
            }
        pairs = _pairs(retriever, task, queries, documents, poolings[0], settings)
    for row in lengths:
        row["cut"] = longer.cut.get(row["times"], 0)
    for rows, key in ((lengths, ("times",)), (attacked, ("attack", "tokens"))):
        first = {(row["pooling"], *(row[name] for name in key[:-1])): row for row in reversed(rows)}
        for row in rows:
            base = first[(row["pooling"], *(row[name] for name in key[:-1]))]
            row["retained"] = {name: row[name] / base[name] if base[name] else math.nan for name in METRICS}
    compared = {pooling: {name: values[name] for name in COMPARED} for pooling, values in by_query.items()}
    result = {
        "data": task.name,
        "kind": retriever.kind,
        "of_pages": retriever.of_pages,
        "queries": len(task.queries),
        "documents": len(task.documents),
        "appended": longer.append,
        "document_length": retriever.document_length,
        "lengthened_document_length": longer.limit,
        "noise": settings.noise,
        "seed": settings.seed,
        "poolings": [pooling_text(pooling) for pooling in poolings],
        "lengths": [row | {"pooling": pooling_text(row["pooling"])} for row in lengths],
        "injection": [row | {"pooling": pooling_text(row["pooling"])} for row in attacked],
        "by_query": by_query,
        "test": "student",
        "pairs": compare(compared, "student") if compared else [],
        "seconds": time.perf_counter() - begun,
        "environment": environment(best_device()),
    }
    return result, pairs


def _poolings(settings: Settings, own: Pooling | None, has_tokens: bool) -> list[Pooling]:
    """The poolings of the settings or the default ones, that of the model first."""
    if not has_tokens:
        if set(settings.poolings) - {Max()}:
            raise RecipeError(
                "--pooling must be max for a sparse or static model, which has no similarities of tokens to pool."
            )
        return [Max()]
    poolings = settings.poolings or DEFAULT_POOLINGS
    return list(dict.fromkeys(poolings if own is None else (own, *poolings)))


@torch.no_grad()
def vector_length_sweep(
    retriever: Retriever, queries: Encoded, documents: Iterable[tuple[int, Encoded]], grades: Tensor
) -> list[dict[str, Any]]:
    """Rank sparse documents of several lengths: the rows of :func:`length_sweep`, ``tokens`` the mean number of terms."""
    rows = []
    for times, batch in documents:
        # A query that stands among the documents is left out of its ranking.
        found, positions = retriever.search(queries, [batch], DEPTH + 1)
        scores = found.new_full((len(grades), len(batch) + 1), -torch.inf)
        scores = scores.scatter(1, positions.where(positions >= 0, len(batch)).to(found.device), found)[:, :-1]
        metrics = retrieval_metrics(scores, grades.to(scores.device))
        entries = batch.ids if isinstance(batch, TokenIds) else batch.terms
        means = {name: values.mean().item() for name, values in metrics.items()}
        rows.append({"times": times, "tokens": len(entries) / len(batch), "pooling": Max(), **means})
    return rows


@torch.no_grad()
def _pairs(
    retriever: Retriever, task: Task, queries: TokenBatch, documents: TokenBatch, pooling: Pooling, settings: Settings
) -> list[Pair]:
    """The first queries, each with the document that is not gold and has the highest score."""
    count = next((count for count in sorted(settings.tokens) if count), 0)
    tokens = injected_tokens(queries, max(settings.tokens), settings.noise, settings.seed)
    grades = task.grades.to(documents.device)
    pairs = []
    for number, text in enumerate(list(task.queries.values())[:PAIRS]):
        query = queries.select(torch.tensor([number], device=queries.device))
        scores = pooled_scores(query, documents, pooling=pooling)[0]
        document = int(scores.masked_fill(~(grades[number] <= 0), -torch.inf).argmax())
        if not grades[number, document] <= 0:
            continue
        own, vectors = (
            batch.values[int(batch.starts[place]) :][: int(batch.lengths[place])]
            for batch, place in ((queries, number), (documents, document))
        )
        injected = {attack: (own @ tokens[attack][number, :count].mT).cpu() for attack in ATTACKS_OF_PAIRS}
        names = [retriever.tokenizer.decode([one]) for one in retriever.query_token_ids(text).tolist()]
        content = task.documents[document]
        page = {"page": content, "patches": retriever.patches(content)} if retriever.of_pages else {}
        shown = f"page {document}" if page else content
        pairs.append(Pair(text, shown, names, (own @ vectors.mT).cpu(), injected, **page))
    return pairs
