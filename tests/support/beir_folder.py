"""A small collection in BEIR's layout."""

from pathlib import Path

from pylate_fastmaxsim.recipes.data.collection import JUDGEMENT_COLUMNS
from tests.support.tiny_recipe import json_lines, text

QUERIES, DOCUMENTS = 6, 150


def tables() -> dict[str, list[dict]]:
    corpus = [
        {"_id": f"{row:04d}", "title": f"number {row}" if row % 2 else "", "text": text(row, 1 + row % 23)}
        for row in range(DOCUMENTS)
    ]
    queries = [{"_id": f"q{row}", "text": text(row * 3, 5)} for row in range(QUERIES + 2)]  # two are not judged
    pairs = [(query, step) for query in range(QUERIES) for step in range(7)]
    qrels = judged(*((f"q{query}", f"{(query * 31 + step * 17) % DOCUMENTS:04d}", step % 3) for query, step in pairs))
    return {"corpus": corpus, "queries": queries, "qrels": qrels}


def judged(*rows: tuple) -> list[dict]:
    return [dict(zip(JUDGEMENT_COLUMNS, row, strict=True)) for row in rows]


def write_folder(folder: Path, file: str = "qrels/test.tsv", **changed: list[dict]) -> Path:
    content = tables() | changed
    (folder / file).parent.mkdir(parents=True)
    for name in ("corpus", "queries"):
        json_lines(folder / f"{name}.jsonl", content[name])
    lines = [list(content["qrels"][0]), *(row.values() for row in content["qrels"])]
    (folder / file).write_text("".join("\t".join(map(str, line)) + "\n" for line in lines))
    return folder
