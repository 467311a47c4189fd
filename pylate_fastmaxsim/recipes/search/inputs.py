"""The collection that the command names: in BEIR's layout, or by its files."""

from __future__ import annotations

from pathlib import Path

from pylate_fastmaxsim.recipes.config.schema import TextEvaluationSection
from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.evaluation.beir import Collection, load_collection, load_files_of_collection


def load_inputs(
    beir: str | None, split: str, corpus: Path | None, queries: Path | None, qrels: Path | None
) -> Collection:
    """The collection of ``--beir``, with its judged queries, or that of ``--corpus``, ``--queries`` and ``--qrels``.

    Raises
    ------
    RecipeError
        Both or neither are given, or something cannot be loaded.
    """
    files = [corpus, queries]
    if (beir is None) == (files == [None, None] and qrels is None) or (beir is None and None in files):
        raise RecipeError(
            "Name what to search: --beir FOLDER_OR_NAME, or --corpus and --queries, and --qrels for metrics."
        )
    if beir is not None:
        return load_collection(TextEvaluationSection(beir=str(Path(beir).expanduser()), split=split), "--beir")
    return load_files_of_collection(corpus, queries, qrels)
