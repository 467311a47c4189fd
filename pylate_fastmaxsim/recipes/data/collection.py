"""Collections in BEIR's layout: a corpus, queries, and judgements (qrels), the grades of documents for queries."""

import csv
import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, IterableDataset, Value, get_dataset_config_names

from pylate_fastmaxsim.integrations.log import log_once
from pylate_fastmaxsim.recipes.data.lists import titled
from pylate_fastmaxsim.recipes.data.tables import (
    has_plain_files,
    is_text,
    load_files,
    load_subset,
    load_table,
    loading,
    open_text,
    require_columns,
    require_texts,
    require_utf8,
)
from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.files import ENDINGS, file_type

IDS_AT_ONCE = 10_000
COLUMNS = ("_id", "text")  # of documents and of queries
PAGES = "image"  # the column of a corpus of pages, in place of text
JUDGEMENT_COLUMNS = ("query-id", "corpus-id", "score")
# TREC's second column, which nothing reads.
ITERATIONS = ("0", "Q0")
LINES_LOOKED_AT = 100


@dataclass(frozen=True)
class Collection:
    """A retrieval task.

    Parameters
    ----------
    corpus
        Documents with the columns ``_id``, ``text`` and perhaps ``title``, on disk; of pages ``_id`` and ``image``.
    queries
        Text of each query by its id.
    judgements
        For each judged query, the grade of each judged document: 0 and less is not relevant.
    """

    corpus: Dataset
    queries: dict[str, str]
    judgements: dict[str, dict[str, int]]


@dataclass(frozen=True)
class RecipeData:
    """Rows that a recipe trains on, and what it is evaluated on.

    That is rows held out of them or of their own, a collection in BEIR's layout, the collections of NanoBEIR, or nothing.
    ``empty`` rows have a text without a letter; None if that is not counted, of rows that are streamed or read by id.
    """

    train: Dataset | IterableDataset
    held_out: Dataset | None = None
    collections: Sequence[Collection] = ()
    empty: int | None = None

    @property
    def is_evaluated(self) -> bool:
        """Tell whether there is something to evaluate on."""
        return self.held_out is not None or bool(self.collections)


def load_collection(name: str, split: str = "test", key: str = "evaluation.beir") -> Collection:
    """Load a collection from the Hub or from a folder, which an error calls ``key``; its queries are the judged ones.

    On the Hub, judgements are the subset ``qrels`` or ``default`` of the data set, or the data set of that name
    with ``-qrels`` behind it. In a folder of files they are ``qrels/SPLIT.tsv`` or ``qrels.tsv``, in BEIR's
    layout or in TREC's.
    """
    name = str(Path(name).expanduser())
    tables = {subset: load_subset(key, name, subset, COLUMNS) for subset in ("corpus", "queries")}
    for subset, table in tables.items():
        _require_texts_with_ids(key, subset, table)
    found = _build_collection(key, name, *tables.values(), _load_judgements(key, name, split))
    judged = {query: text for query, text in found.queries.items() if query in found.judgements}
    return replace(found, queries=judged)


def load_files_of_collection(corpus: Path, queries: Path, judgements: Path | None = None) -> Collection:
    """Load a collection from a file of documents and one of queries (.jsonl or .parquet), and perhaps judgements.

    Columns are those of BEIR's files; judgements may also be in TREC's layout. All queries are kept, and without
    judgements those of none are known. Errors name ``--corpus``, ``--queries`` and ``--qrels``.
    """
    tables = []
    for subset, file in (("corpus", corpus), ("queries", queries)):
        key = f"--{subset}"
        if file_type(file) is None:
            raise RecipeError(f"{key} must be a file that ends in {ENDINGS}, got {file}.")
        tables.append(require_columns(key, subset, load_files(key, {"train": [str(file)]}), COLUMNS))
        _require_texts_with_ids(key, subset, tables[-1])
    rows = None if judgements is None else read_judgements("--qrels", judgements)
    return _build_collection("--qrels", str(judgements), *tables, rows)


def _build_collection(key: str, name: str, corpus: Dataset, texts: Dataset, rows: Dataset | None) -> Collection:
    """The collection with all queries; all judged ones must be among them."""
    judgements = {} if rows is None else grades_by_query(key, rows)
    queries = {str(row["_id"]): row["text"] for row in texts}
    if missing := [query for query in judgements if query not in queries]:
        some = len(missing) < len(judgements)
        reason = f"the query {missing[0]} is judged but is not among the queries" if some else "no query is judged"
        raise RecipeError(f"{key}: {name} does not fit together: {reason}.")
    if judgements:
        _require_judged_documents(key, name, corpus, judgements)
    return Collection(corpus, queries, judgements)


def _require_texts_with_ids(key: str, subset: str, table: Dataset) -> None:
    require_ids(key, f"the subset {subset}", table, "_id")
    # As of passages with the id of their document: only one of them would count.
    counted = pc.value_counts(table.data.column("_id"))
    repeated = pc.index(pc.greater(counted.field("counts"), 1), True).as_py()
    if repeated >= 0:
        raise RecipeError(
            f"{key}: '_id' of the subset {subset} must be another in each row, but {counted.field('values')[repeated]} "
            "is that of several."
        )
    # Lists and numbers would be encoded as Python prints them.
    require_texts(f"{key}: 'text' of the subset {subset}", table, "text", gaps=subset == "corpus")
    # A title may be null in all rows.
    if subset == "corpus" and "title" in table.column_names and table.features["title"] != Value("null"):
        require_texts(f"{key}: 'title' of the subset corpus", table, "title", gaps=True)
    for column in table.column_names:
        if is_text(table, column):
            require_utf8(f"{key}: {column!r} of the subset {subset}", table.data.column(column))


def _require_judged_documents(key: str, name: str, corpus: Dataset, judgements: dict[str, dict[str, int]]) -> None:
    """Refuse a corpus without any judged document; log how many judged documents it lacks."""
    judged = {document for grades in judgements.values() for document in grades}
    missing = set(judged)
    for rows in corpus.select_columns("_id").iter(IDS_AT_ONCE):
        missing.difference_update(map(str, rows["_id"]))
    if len(missing) == len(judged):
        raise RecipeError(
            f"{key}: {name} does not fit together: no judged document is in the corpus, whose first id is "
            f"{str(corpus[0]['_id'])!r} where a judged one is {next(iter(next(iter(judgements.values()))))!r}."
        )
    # Logged once per run, not by every process.
    if missing and int(os.environ.get("RANK", "0")) == 0:
        log_once(
            "%s",
            f"{key}: {len(missing)} of {len(judged)} judged documents are not in the corpus of {name}, for example "
            f"{min(missing)!r}; no search finds them, which lowers the metrics where they are relevant.",
        )


def _load_judgements(key: str, name: str, split: str) -> Dataset:
    if has_plain_files(name):
        files = [file for file in (Path(name, "qrels", f"{split}.tsv"), Path(name, "qrels.tsv")) if file.is_file()]
        if not files:
            raise RecipeError(f"{key}: the folder {name} must hold qrels/{split}.tsv or qrels.tsv.")
        return read_judgements(key, files[0])
    with loading(key):
        subsets = get_dataset_config_names(name)
    subset = next((subset for subset in ("qrels", "default") if subset in subsets), None)
    if subset is None:
        table = load_table(key, f"{name}-qrels", split=split)
    else:
        table = load_table(key, name, subset, split=split)
    return require_columns(key, "qrels", table, JUDGEMENT_COLUMNS)


def is_the_query(collection: Collection, query: str, title: str | None, text: str | None) -> bool:
    """Tell whether the document that has the id of a query is that query.

    BEIR's evaluator compares ids only, and drops documents wrongly where queries and documents are numbered
    independently, as in Cranfield. ArguAna's queries are documents without title; SciDocs' queries are titles.
    """
    if collection.judgements.get(query, {}).get(query, 0) > 0:
        return False
    wanted = (collection.queries[query] or "").strip()
    return wanted != "" and wanted in ((title or "").strip(), (text or "").strip(), titled(title, text))


def document_texts(rows: dict[str, list]) -> list[str]:
    """Title and text of each document of a corpus."""
    return [titled(title, text) for title, text in zip(titles(rows), rows["text"], strict=True)]


def is_of_pages(corpus: Dataset) -> bool:
    """Tell whether documents are images."""
    return "text" not in corpus.column_names


def titles(rows: dict[str, list]) -> list[str | None]:
    """The title of each document, or None."""
    return rows.get("title") or [None] * len(rows["text"])


def corpus_digest(corpus: Dataset) -> str:
    """A digest of the ids, titles and texts in their order. Pages have their content as their id."""
    digest = hashlib.blake2b(digest_size=16)
    pages = is_of_pages(corpus)
    for rows in (corpus.select_columns("_id") if pages else corpus).iter(IDS_AT_ONCE):
        digest.update(json.dumps([list(map(str, rows["_id"])), [] if pages else document_texts(rows)]).encode())
    return digest.hexdigest()


def is_trec(file: str | Path) -> bool:
    """Tell whether the first lines of a file are judgements in the layout of TREC: ``qid 0 docid grade``, with white space."""
    try:
        with open_text(str(file)) as lines:
            rows = [line.split() for line in islice(lines, LINES_LOOKED_AT) if line.strip()]
    except (OSError, UnicodeDecodeError):  # read_judgements or datasets say what is wrong
        return False
    return bool(rows) and all(len(row) == 4 and row[1] in ITERATIONS and row[3].lstrip("-").isdigit() for row in rows)


def read_judgements(key: str, file: str | Path) -> Dataset:
    """Judgements from a file with tabs and column names, as of BEIR, or from one of TREC; ids are text."""
    with loading(key):
        with open_text(str(file)) as lines:
            lines = [line for line in lines if line.strip()]
        names = next(csv.reader(lines, delimiter="\t"), ())
        trec = not {*names} >= {*JUDGEMENT_COLUMNS} and len(next(iter(lines), "").split()) == 4
        rows = list(map(_trec_row, lines) if trec else csv.DictReader(lines, delimiter="\t"))
    if not rows:
        raise RecipeError(f"{key}: there are no rows in {file}.")
    if None in rows:
        raise RecipeError(
            f"{key}: a line of {file} must be qid 0 docid grade, got {lines[rows.index(None)].strip()!r}."
        )
    if not rows[0].keys() >= set(JUDGEMENT_COLUMNS):
        raise RecipeError(
            f"{key}: the first line of {file} must name the columns {', '.join(JUDGEMENT_COLUMNS)}, with tabs between them, "
            "or be qid 0 docid grade, as in TREC."
        )
    return Dataset.from_dict({column: [row[column] for row in rows] for column in JUDGEMENT_COLUMNS})


def _trec_row(line: str) -> dict[str, str] | None:
    fields = line.split()
    return dict(zip(JUDGEMENT_COLUMNS, (fields[0], *fields[2:]), strict=True)) if len(fields) == 4 else None


def grades_by_query(key: str, rows: Dataset) -> dict[str, dict[str, int]]:
    """The grade of each judged document, for each query. Grades below 0 are 0, not relevant, as for trec_eval."""
    for column in JUDGEMENT_COLUMNS[:2]:
        require_ids(key, "the judgements", rows, column)
    judgements: dict[str, dict[str, int]] = {}
    for query, document, grade in zip(*(rows[:][column] for column in JUDGEMENT_COLUMNS), strict=True):
        try:
            whole = int(float(grade))  # of floats too, as pandas stores integers in columns that had missing values
            if float(grade) != whole or abs(whole) >= 2**31:  # metrics compute with them
                raise ValueError
        except (TypeError, ValueError, OverflowError):  # not a number, not a whole one, nan or infinite
            raise RecipeError(
                f"{key}: the grade of query {query} and document {document} must be an integer, got {grade!r}."
            ) from None
        first = judgements.setdefault(str(query), {}).setdefault(str(document), whole)
        if whole != first:
            raise RecipeError(
                f"{key}: the query {query} and the document {document} must have one grade, but are judged {first} and "
                f"{whole}."
            )
    return {query: {name: max(grade, 0) for name, grade in grades.items()} for query, grades in judgements.items()}


def require_ids(key: str, where: str, table: Dataset, column: str) -> None:
    """Refuse rows without an id, and ids of several types."""
    row = pc.index(pc.is_null(table.data.column(column)), True).as_py()
    if row >= 0:
        raise RecipeError(f"{key}: {column!r} of {where} must hold an id in every row, but row {row} has none.")
    # datasets keeps rows of several types as JSON.
    if not (is_text(table, column) or pa.types.is_primitive(table.data.column(column).type)):
        raise RecipeError(f"{key}: {column!r} of {where} must be text in all rows or a number in all rows.")


def relevant_pairs(key: str, rows: Dataset) -> Dataset:
    """The query and the document of each judgement with a grade above 0, under the names that they have in ``rows``."""
    pairs = [
        (query, document)
        for query, grades in grades_by_query(key, rows).items()
        for document, grade in grades.items()
        if grade > 0
    ]
    if not pairs:
        raise RecipeError(f"{key}: no document is judged relevant, with a grade above 0.")
    return Dataset.from_dict(dict(zip(JUDGEMENT_COLUMNS[:2], zip(*pairs, strict=True), strict=True)))
