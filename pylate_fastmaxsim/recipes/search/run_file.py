"""Rankings as a TREC run file."""

from __future__ import annotations

from pathlib import Path

from pylate_fastmaxsim.files.replace import replace_file
from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.evaluation.beir import IDS_AT_ONCE, Collection
from pylate_fastmaxsim.recipes.evaluation.ranking import Ranking

TAG = "fastmaxsim"


def write_run(file: Path, found: Ranking) -> None:
    """Write ``query Q0 document rank score tag`` for each result, ranks from 1; the file appears when it is complete.

    Scores have 9 digits, which tells all float32 numbers apart.
    """

    def write(scratch: str) -> None:
        with open(scratch, "w", encoding="utf-8") as lines:
            for query, documents in found.items():
                lines.writelines(
                    f"{query} Q0 {document} {rank} {score:.9g} {TAG}\n"
                    for rank, (document, score) in enumerate(documents.items(), start=1)
                )

    replace_file(file, write)


def require_ids_of_one_word(collection: Collection) -> None:
    """Refuse ids with a space, which a run file cannot hold.

    Raises
    ------
    RecipeError
        The id of a query or a document has white space, or none of anything else.
    """
    ids = collection.corpus.select_columns("_id").iter(IDS_AT_ONCE)
    for name, part in (("query", list(collection.queries)), *(("document", rows["_id"]) for rows in ids)):
        for each in map(str, part):
            if each.split() != [each]:
                raise RecipeError(
                    f"--run: ids must have no white space, which separates the columns of a run file, but {each!r} is that "
                    f"of a {name}."
                )
