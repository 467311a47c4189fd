"""The rows of a recipe, and the held-out retrieval task made from some of them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from datasets import Dataset, load_dataset
from pylate.evaluation import PyLateInformationRetrievalEvaluator

from pylate_fastmaxsim.recipes.distillation import load_distillation
from pylate_fastmaxsim.recipes.load import FILE_TYPES
from pylate_fastmaxsim.recipes.schema import DataSection, Recipe, RecipeError

# Stock MaxSim holds [queries, documents, query tokens, document tokens] while it evaluates; the
# evaluator scores documents in chunks, sized so that this stays below 2**27 fp32 values (512 MiB).
EVALUATION_SIMILARITIES = 2**27


@dataclass(frozen=True)
class RecipeData:
    """Rows to train on, and rows held out for the retrieval evaluation (None without one)."""

    train: Dataset
    held_out: Dataset | None


def load_data(recipe: Recipe) -> RecipeData:
    """Load the rows that a recipe names, keep its columns, and hold some out.

    Docstring pairs must have been written to a file first, which is what ``prepare`` does.
    """
    if recipe.data.source == "distillation":
        dataset = load_distillation(recipe.data, partial(_load_subset, recipe.data))
    else:
        dataset = _load_columns(recipe)
    held_out = recipe.evaluation.rows
    if len(dataset) < held_out + recipe.training.per_device_train_batch_size:
        raise RecipeError(
            f"evaluation.rows must leave at least one training batch, but the data has {len(dataset)} rows, "
            f"{held_out} are held out and a batch takes {recipe.training.per_device_train_batch_size}."
        )
    dataset = dataset.shuffle(seed=recipe.data.seed)
    if recipe.data.max_rows is not None:
        dataset = dataset.select(range(min(recipe.data.max_rows, len(dataset))))
    if not held_out:
        return RecipeData(dataset, None)
    return RecipeData(dataset.select(range(held_out, len(dataset))), dataset.select(range(held_out)))


def _load_columns(recipe: Recipe) -> Dataset:
    dataset = _load_rows(recipe.data)
    columns = recipe.data.columns or dataset.column_names
    for column in columns:
        if column not in dataset.column_names:
            raise RecipeError(
                f"data.columns: no column {column!r}, the data has the columns {', '.join(dataset.column_names)}."
            )
    _check_columns(recipe, dataset, columns)
    return dataset.select_columns(columns)


def _load_rows(data: DataSection) -> Dataset:
    if data.source == "files":
        kind = FILE_TYPES[Path(data.files[0]).suffix]
        return _load_dataset("data.files", kind, data_files=data.files, split="train")
    return _load_dataset("data.name", data.name, data.config, split=data.split or "train")


def _load_subset(data: DataSection, subset: str) -> Dataset:
    """One table of a data set in several, from the Hub, from a copy of it on disk, or from plain files in a folder."""
    folder = Path(data.name)
    if not folder.is_dir() or (folder / "README.md").exists():
        return _load_dataset("data.name", data.name, subset, split=data.split or "train")
    for suffix, kind in FILE_TYPES.items():
        if (file := folder / f"{subset}{suffix}").is_file():
            return _load_dataset("data.name", kind, data_files=str(file), split="train")
    names = " or ".join(f"{subset}{suffix}" for suffix in FILE_TYPES)
    raise RecipeError(f"data.name: the folder {data.name} must hold {names}, or a README.md that names its subsets.")


def _load_dataset(key: str, *arguments, **options) -> Dataset:
    try:
        return load_dataset(*arguments, **options)
    except Exception as error:  # datasets raises its own, the Hub client's and pyarrow's errors alike
        reason = str(error).strip().split("\n")[0]
        raise RecipeError(f"{key} cannot be loaded: {type(error).__name__}: {reason}") from error


def _check_columns(recipe: Recipe, dataset: Dataset, columns: list[str]) -> None:
    """PyLate's collator tells queries, documents and scores apart by the names of the columns."""
    query, *others = columns
    if not ("query" in query or "anchor" in query):
        raise RecipeError(f"data.columns must start with the query column, named query or anchor, got {query!r}.")
    if recipe.loss.name == "distillation" and (len(others) != 2 or others[1] not in ("scores", "label")):
        raise RecipeError(
            f"data.columns must be [query, documents, scores] for distillation, got [{', '.join(columns)}]."
        )
    texts = columns if recipe.loss.name != "distillation" else [query]
    for column in texts:
        if getattr(dataset.features[column], "dtype", None) not in ("string", "large_string"):
            raise RecipeError(f"data.columns: {column!r} must hold text, but it holds {dataset.features[column]}.")


def retrieval_evaluator(recipe: Recipe, held_out: Dataset, query_length: int, document_length: int):
    """nDCG@10 of the held-out queries over all held-out documents, with PyLate's own evaluator.

    The relevant document of a query is its first one, or for distillation the teacher's best.
    """
    query_column, *document_columns = held_out.column_names
    queries, corpus, relevant = {}, {}, {}
    for number, row in enumerate(held_out):
        if recipe.loss.name == "distillation":
            documents, scores = (row[column] for column in document_columns)
            best = scores.index(max(scores))
        else:
            documents, best = [row[column] for column in document_columns], 0
        queries[f"q{number}"] = row[query_column]
        for place, document in enumerate(documents):
            corpus[f"d{number}-{place}"] = document
        relevant[f"q{number}"] = {f"d{number}-{best}"}
    chunk = EVALUATION_SIMILARITIES // (len(queries) * query_length * document_length)
    return PyLateInformationRetrievalEvaluator(
        queries,
        corpus,
        relevant,
        corpus_chunk_size=max(1, chunk),
        batch_size=recipe.evaluation.batch_size,
        name="held-out",
        write_csv=False,
    )
