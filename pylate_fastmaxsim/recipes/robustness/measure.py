"""Measure how a trained model holds up: longer documents, injected tokens, and what they do to a few pairs."""

from __future__ import annotations

import time
from argparse import ArgumentTypeError
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import Tensor

from pylate_fastmaxsim.comparison.runs import environment
from pylate_fastmaxsim.diagnostics.injection import COUNTS, NOISE, injected_tokens, injection_sweep
from pylate_fastmaxsim.diagnostics.robustness import TIMES, length_sweep
from pylate_fastmaxsim.integrations.options import POOLINGS, pooling_from_text
from pylate_fastmaxsim.ops.pooled import LogSumExp, Max, Pooling, Softmax, TopK, pooled_scores
from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.models.retriever import NotFiniteError, retriever_of
from pylate_fastmaxsim.recipes.robustness.lengthen import Append, Lengthened
from pylate_fastmaxsim.recipes.robustness.task import Task
from pylate_fastmaxsim.tokens import TokenBatch

if TYPE_CHECKING:
    from pylate.models import ColBERT

DEFAULT_POOLINGS = (Max(), TopK(4), Softmax(0.1), LogSumExp(0.1))
PAIRS = 3


@dataclass(frozen=True)
class Settings:
    """What is measured; the names are those of the command's options."""

    poolings: Sequence[Pooling] = DEFAULT_POOLINGS
    times: Sequence[int] = TIMES
    tokens: Sequence[int] = COUNTS
    append: Append = "auto"
    noise: float = NOISE
    seed: int = 0


def settings_of(poolings: Sequence[str], times: str, tokens: str, append: str, noise: float, seed: int) -> Settings:
    """The settings of a command line.

    Raises
    ------
    RecipeError
        One cannot be read.

    Examples
    --------
    >>> from pylate_fastmaxsim.recipes.robustness.measure import settings_of
    >>> settings_of(["softmax=0.1"], "1,4", "0,50", "auto", 0.5, 0).poolings
    (Softmax(temperature=0.1),)
    """
    try:
        chosen = tuple(dict.fromkeys(map(pooling_from_text, poolings))) or DEFAULT_POOLINGS
    except ArgumentTypeError as error:
        raise RecipeError(f"--{error}") from None
    if append not in get_args(Append):
        raise RecipeError(f"--append must be {', '.join(get_args(Append))}, got {append!r}.")
    return Settings(chosen, _numbers("--times", times, 1), _numbers("--tokens", tokens, 0), append, noise, seed)


def _numbers(option: str, text: str, least: int) -> list[int]:
    values = [value.strip() for value in text.split(",")]
    if not all(value.isdecimal() and int(value) >= least for value in values):
        raise RecipeError(f"{option} {text}: write it as 1,2,4, with whole numbers from {least}.")
    return sorted(set(map(int, values)))


@dataclass(frozen=True)
class Pair:
    """A query and a document that is not gold for it, before and after the attack on the query.

    Parameters
    ----------
    query, document
        Texts.
    query_tokens
        The tokens of the query.
    similarities
        ``[Lq, Ld + K]``: the document's tokens, then K injected ones.
    injected
        K.
    """

    query: str
    document: str
    query_tokens: list[str]
    similarities: Tensor
    injected: int


def pooling_text(pooling: Pooling) -> str:
    """A pooling as the command line has it.

    Examples
    --------
    >>> from pylate_fastmaxsim import Max, TopK
    >>> from pylate_fastmaxsim.recipes.robustness.measure import pooling_text
    >>> pooling_text(Max()), pooling_text(TopK(4))
    ('max', 'top_k=4')
    """
    (name,) = (name for name, kind in POOLINGS.items() if isinstance(pooling, kind))
    return "=".join([name, *map(str, vars(pooling).values())])


def measure(model: ColBERT, task: Task, settings: Settings, batch_size: int) -> tuple[dict[str, Any], list[Pair]]:
    """The content of ``robustness.json`` but the names of model and recipe, and a few pairs to look at.

    Raises
    ------
    RecipeError
        There is no text to append, or embeddings of the model are NaN or infinite.
    """
    begun = time.perf_counter()
    try:
        queries = _encoded(model, task.queries, batch_size, is_query=True)
        documents = _encoded(model, task.documents, batch_size, is_query=False)
        longer = Lengthened(model, task, documents, list(settings.times), settings.append, batch_size, settings.seed)
        grades = task.grades.to(documents.device)
        lengths = length_sweep(queries, longer, grades, settings.poolings)
    except NotFiniteError:
        raise RecipeError(
            "the model must give finite embeddings, but some are NaN or infinite, as after a training that diverged."
        ) from None
    attacked = injection_sweep(
        queries, documents, grades, settings.poolings, settings.tokens, settings.noise, settings.seed
    )
    for row in lengths:
        row["cut"] = longer.cut.get(row["times"], 0)
    result = {
        "data": task.name,
        "queries": len(task.queries),
        "documents": len(task.documents),
        "appended": longer.append,
        "document_length": model.document_length,
        "lengthened_document_length": longer.limit,
        "noise": settings.noise,
        "seed": settings.seed,
        "poolings": [pooling_text(pooling) for pooling in settings.poolings],
        "lengths": [row | {"pooling": pooling_text(row["pooling"])} for row in lengths],
        "injection": [row | {"pooling": pooling_text(row["pooling"])} for row in attacked],
    }
    pairs = _pairs(model, task, queries, documents, grades, settings)
    return result | {"seconds": time.perf_counter() - begun, "environment": environment(documents.device)}, pairs


def _encoded(model: ColBERT, texts: list[str], batch_size: int, is_query: bool) -> TokenBatch:
    batch = retriever_of(model, finite=True).encode(texts, batch_size, is_query=is_query, show_progress=True)
    return batch.with_values(batch.values.float())


@torch.no_grad()
def _pairs(
    model: ColBERT, task: Task, queries: TokenBatch, documents: TokenBatch, grades: Tensor, settings: Settings
) -> list[Pair]:
    """The first queries, each with the document that is not gold and has the highest score by the first pooling."""
    count = next((count for count in sorted(settings.tokens) if count), 0)
    tokens = injected_tokens(queries, max(settings.tokens), settings.noise, settings.seed).targeted
    pairs = []
    for number in range(min(PAIRS, len(queries))):
        query = queries.select(torch.tensor([number], device=queries.device))
        scores = pooled_scores(query, documents, pooling=settings.poolings[0])[0]
        document = int(scores.masked_fill(~(grades[number] <= 0), -torch.inf).argmax())
        if not grades[number, document] <= 0:
            continue
        own, vectors = (
            batch.values[int(batch.starts[place]) :][: int(batch.lengths[place])]
            for batch, place in ((queries, number), (documents, document))
        )
        similarities = own @ torch.cat((vectors, tokens[number, :count])).mT
        names = [model.tokenizer.decode([one]) for one in _query_ids(model, task.queries[number])]
        pairs.append(Pair(task.queries[number], task.documents[document], names, similarities.cpu(), count))
    return pairs


def _query_ids(model: ColBERT, text: str) -> list[int]:
    """The tokens of a query of which ``model.encode`` returns embeddings."""
    tokenized = model.tokenize([text], is_query=True)
    ids, mask = tokenized["input_ids"][0], tokenized["attention_mask"][0]
    return (ids if model.do_query_expansion else ids[mask.bool()]).tolist()
