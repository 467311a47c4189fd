"""Rows that do not fit a recipe are one sentence, which names the key: tables of rows and of what is said."""

import re

import pytest
import yaml

from pylate_fastmaxsim.recipes.config.schema import DataSection
from pylate_fastmaxsim.recipes.data.rows import load_columns, load_rows
from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.load import load_recipe
from pylate_fastmaxsim.recipes.models.load import kind_of
from tests.support.case_tables import case_table, cases
from tests.support.id_files import rows_of_ids, write_lines
from tests.support.recipe_kinds import KINDS, LATE, tiny_of
from tests.support.tiny_recipe import json_lines, write

# Read as a table and as a stream.
FIRST_ROWS = r"""
{query: q, pos: [p], neg: []} | data.negatives_per_query: row 0 has no negative; leave such rows out
{text: p, query: q} | data.columns must be given where the data has 'text' before 'query'
{positive: p, query: q, neg: [n]} | data.columns must be given where the data has 'positive' before
{query: q, neg: [n], pos: [p]}
    | data.columns must be given where the data has 'neg' before 'pos', .*; for example .query, pos, neg.
{query: q, pos: p, neg: [n], label: '1'} | data.columns: 'label' is a column of labels or scores, which the contrastive
{query: q, pos: p, neg: [n], neg_scores: [0.5]}
    | data.columns must be given where columns .* found the query 'query', the positive 'pos', the negatives 'neg', and
    'neg_scores'; for example .query, pos, neg.\.$
{question: q, title: t, positive: p, hardNeg1: n, language: en}
    | data.columns must .* the negatives 'hardNeg1', and 'positive', 'language'; .* .question, positive, hardNeg1.
{query: q, negative: n} | data.columns .* where the data has 'negative' in the place of the positive, behind 'query'
{query: '12', pos: '34', neg: '56'} | data.collection is missing: 'query' and the other columns hold ids
{query: q, pos: [p], neg: [{text: a}, {title: B, summary: b}]}
    | data.text_key .* 'neg' of row 0 has the keys title, summary,
{query: q, pos: [p], neg: [{body: a, content: b}]} | data.text_key .* has the keys body, content, of which several are
{query: q, pos: [p], neg: [{text: [a, b]}]}
    | data.columns: text and title must be texts, but 'neg' of row 0 has \['a', 'b'\]
"""

# A row if it is not the usual one, what the row behind it has in place of its values, and overrides.
CONTRASTIVE = r"""
{query: q, pos: [p], neg: [a, b]} | {neg: [a]} |
    | data.negatives_per_query is missing, .*: the first has 2, row 1 has 1.
| {neg: []} | data.negatives_per_query=2 | data.negatives_per_query: row 1 has no negative; leave
| {pos: []} | data.negatives_per_query=2 | data.columns: row 1 has no text in 'pos'.
| | data.columns=[neg,pos] | data.columns: 'neg' is the query and must hold texts, but it holds lists.
| | data.negatives_per_query=2 data.columns=[query,pos] | data.negatives_per_query needs a column of
{query: q} | | data.negatives_per_query=2 data.streaming=true evaluation.rows=0 model.build=null model.name_or_path=a
    | data.columns
{query: q, pos: [p], neg: {bm25: [a], dense: [b]}} | | data.negatives=[bm25,splade]
    | data.negatives must name systems that 'neg' has in the first row .bm25, dense., got splade.
| | data.negatives=[bm25] | data.negatives must name systems .*it has none
| | data.n_ways=4 | data.n_ways does not apply to the contrastive loss
{query: q, pos: [p], neg: [{title: t, abstract: a}]} | | data.text_key=body
    | data.text_key must name .*, got body: 'neg' of row 0 has the keys title, abstract, of which none is among body
{query: q, main_idea: p} | | | data.columns must be the query, its positive and .* got .query.; a column
{"query;positive": q} | | | data.columns must be .* got .query;positive.; the file is divided by semicolons
"""

DISTILLATION = r"""
| {scores: [0.5, 0.2]} | | data.columns: .* and a score for each, but row 1 has 3 and 2 scores.$
| {documents: [a, null, c]} | | data.columns: 'documents' must hold texts, but some are missing.$
| {scores: [3.0, null, 1.0]} | | data.columns: 'scores' must hold finite numbers, but some are missing.$
{query: q, documents: [a, b], scores: [high, low]} | |
    | data.columns: 'scores' must hold lists of finite numbers, but it holds lists of string.$
{query: q, documents: [1, 2], scores: [2.0, 1.0]} | |
    | data.columns: 'documents' must hold lists of texts, but it holds lists of int64.$
| {documents: [a, b, "caf\udce9"]} | | data.columns: 'documents' must hold text in UTF-8, but some rows do not.$
{query: q, label: l, scores: [1.0]} | | data.columns=[query,label,scores]
    | data.columns must be \[query, documents, scores\] for distillation, got
| | data.negatives_per_query=2 | data.negatives_per_query does not apply to the distillation
"""

# As PyLate's collator reads names.
COLBERT = r"""
{query: q, positive: p, hard_query: n} | | data.columns=[query,positive,hard_query]
    | data.columns: PyLate's collator encodes 'hard_query' as queries
{query: q, positive_id: p} | | data.columns=[query,positive_id]
    | data.columns: PyLate's collator leaves out 'positive_id'
"""

# As that of Sentence Transformers.
SPLADE = r"""
{a: q, return_loss: d} | | | data.columns: 'return_loss' is no text for Sentence Transformers; name only
{a: q} | | | data.columns must be the query, its positive and any negatives, got \[a\]
{a: q, b: 1} | | | data.columns: 'b' must hold text, but it holds Value
"""


# Lines of a file, between slashes, whose values are separated by tabs.
TRIPLES = r"""
100 500 7 | | data.files: 'negative' of triples.tsv has 7, which is not in collection.tsv.
1 500 499 | | data.files: 'query' of triples.tsv has 1, which is not in queries.tsv.
100 500 499 / 99 500 | | data.negatives_per_query is missing, .*: the first has 1, row 1 has 0.
100 500 / 99 500 / 1 2 3 | | data.files cannot be loaded: .*Expected 2 fields in line 3, saw 3
pid qid / 500 100 | | data.columns must be given where the data has 'pid' before 'qid'
query-id corpus-id score / 100 500 0 | | data.files: no document is judged relevant, with a grade above
query-id corpus-id score / 100 500 x | | data.files: the grade of query 100 and document 500 must be
query query b | | data.files: the first line of .*triples.tsv must name each of its columns once
| | data.files: there are no rows in .*triples.tsv.
100 500 499 | data.collection=null | data.collection is missing; data.queries needs it.
positive query / p q | data.collection=null data.queries=null
    | data.columns must be given where the data has 'positive' before 'query'
"""


def refusal(folder, kind: str, loss: str, rows: list[dict], *overrides: str) -> str:
    """The error of rows, which are read from a file of JSON lines."""
    recipe = write(folder, tiny_of(kind, folder, loss={"name": loss}))
    json_lines(folder / "pairs.jsonl", rows)
    with pytest.raises(RecipeError) as error:
        loaded = load_recipe(recipe, overrides)
        load_rows(loaded, kind_of(loaded.model))
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(("row", "sentence"), cases(FIRST_ROWS))
def test_rows_whose_first_does_not_fit(row, sentence, streaming, tmp_path):
    stream = ("data.streaming=true", "evaluation.rows=0", f"model={{kind: {LATE}, name_or_path: a}}") * streaming
    assert re.match(sentence, refusal(tmp_path, LATE, "contrastive", [yaml.safe_load(row)] * 4, *stream))


USUAL = {"contrastive": {"query": "q", "pos": ["p"], "neg": ["a"]}}
USUAL["distillation"] = {"query": "q", "documents": ["a", "b", "c"], "scores": [3.0, 2.0, 1.0]}
TABLES = {"contrastive": CONTRASTIVE, "distillation": DISTILLATION, "colbert": COLBERT, "splade": SPLADE}


@pytest.mark.parametrize(
    ("name", "row", "changed", "overrides", "sentence"),
    [(name, *case) for name, table in TABLES.items() for case in cases(table) if name != "colbert" or name == LATE],
)
def test_rows_that_do_not_fit(name, row, changed, overrides, sentence, tmp_path):
    kind, loss = (name, "contrastive") if name in KINDS else (LATE, name)
    first, change = yaml.safe_load(row) or USUAL[loss], yaml.safe_load(changed) or {}
    assert re.match(sentence, refusal(tmp_path, kind, loss, [first, first | change], *overrides.split()))


@pytest.mark.parametrize(("lines", "overrides", "sentence"), cases(TRIPLES))
def test_triples_that_do_not_fit(lines, overrides, sentence, tmp_path):
    lines = [line.strip().replace(" ", "\t") for line in lines.split("/") if line.strip()]
    with pytest.raises(RecipeError, match=f"^{sentence}") as error:
        rows_of_ids(tmp_path, "triples.tsv", lines, *overrides.split())
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("line", ["[1, 2, [3]]", "[1]", '{"qid": 1}', "[1, 2", "[1, null, 3]"])
def test_a_line_of_triples_that_is_none_is_named(line, tmp_path):
    said = r"^data.files: line 2 of .*triples.jsonl must be \[qid, pid, pid, ...\], as the"
    with pytest.raises(RecipeError, match=said):
        rows_of_ids(tmp_path, "triples.jsonl", ["[100, 500, 499]", line])


@case_table(r"""
lines | sentence
query,positive / q,p,x | data.files: the first row of .*a.csv has 2 values, but the second has 3: q,
,query,positive / 0,q,p | data.files: the first line of .*a.csv must name each of its columns once
query,positive | data.files: there are no rows in .*a.csv.
""")
def test_values_under_the_name_of_another_column(lines, sentence, tmp_path):
    file = write_lines(tmp_path / "a.csv", lines.split(" / "))
    with pytest.raises(RecipeError, match=f"^{sentence}"):
        load_columns(DataSection("files", files=[file]), "data")
