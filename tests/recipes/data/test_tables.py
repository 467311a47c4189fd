import os
import shutil
import statistics

import pytest
from datasets import Dataset, DatasetDict

from pylate_fastmaxsim.recipes.data.docstrings import docstring_pairs, split_docstring
from pylate_fastmaxsim.recipes.data.tables import load_files, load_subset, load_table
from pylate_fastmaxsim.recipes.errors import RecipeError
from tests.support.tiny_recipe import hub_dataset

ROWS = [{"query": f"query {row}", "positive": f"document {row}"} for row in range(9)]


@pytest.mark.parametrize("ending", ["json", "parquet"])
def test_files_that_do_not_fit(ending, tmp_path):
    files = []
    for name, row in {"train-0": {"query": "q", "positive": "d"}, "train-1": {"query": "q", "answer": "a"}}.items():
        files.append(str(tmp_path / f"{name}.{ending}"))
        getattr(Dataset.from_list([row] * 9), f"to_{ending}")(files[-1])
    sentence = r"^data: all rows must have the columns of the first \(query, positive\), but some have answer.$"
    with pytest.raises(RecipeError, match=sentence):
        load_files("data", {"train": files})
    with pytest.raises(RecipeError, match=sentence):
        load_table("data", str(tmp_path), split="train")


def test_a_folder_written_by_save_to_disk(tmp_path):
    rows = Dataset.from_list(ROWS)
    rows.save_to_disk(tmp_path / "table-saved")
    DatasetDict(train=rows).save_to_disk(tmp_path / "splits-saved")
    sentence = "^data.name: the folder .*-saved was written by save_to_disk of datasets, which is not read here; "
    for load, name, *how in ((load_table, "table"), (load_subset, "splits", "train", ("query",))):
        with pytest.raises(RecipeError, match=sentence):
            load("data.name", str(tmp_path / f"{name}-saved"), *how)


def test_names_that_datasets_gives_a_meaning_of_its_own(tmp_path, monkeypatch):
    # One is that of a folder named after a kind of files, one a pattern.
    for name, rows in {"rows.jsonl": ROWS, "json/others.jsonl": ROWS[:5], "runs [1]/rows.jsonl": ROWS[:3]}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Dataset.from_list(rows).to_json(str(tmp_path / name))
    monkeypatch.chdir(tmp_path)
    assert len(load_files("data.files", {"train": ["rows.jsonl"]})) == 9
    assert len(load_files("data.files", {"train": ["runs [1]/rows.jsonl"]})) == 3


@pytest.mark.parametrize("layout", ["files", "hub"])
def test_a_folder_that_is_written_anew_is_read_anew(layout, tmp_path):
    folder = tmp_path / "data"

    def load(prefix: str) -> list[str]:
        rows = [{"document_id": f"d{row}", "text": f"{prefix} {row}"} for row in range(60)]
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        if layout == "hub":
            hub_dataset(folder, documents=rows)
        else:
            Dataset.from_list(rows).to_json(folder / "documents.jsonl")
            (folder / "README.md").write_text("# my notes, which name no subsets\n")
        for file in folder.rglob("*"):  # as of an archive in which all files have one time
            os.utime(file, ns=(0, 0))
        return load_subset("data.name", str(folder), "documents", ("document_id", "text"))[:]["text"]

    assert load("old")[7] == "old 7"
    assert load("new")[7] == "new 7"


def test_pairs_of_docstrings_are_many_uneven_and_the_same_each_time():
    pairs = docstring_pairs(["numpy"], limit=600, seed=3)
    assert pairs[:100] == docstring_pairs(["numpy"], limit=100, seed=3)
    assert pairs[:20] != docstring_pairs(["numpy"], limit=20, seed=4)
    assert len({pair["query"] for pair in pairs}) == len({pair["positive"] for pair in pairs}) == len(pairs) == 600
    for pair in pairs:
        assert pair["query"].lower() not in pair["positive"].lower()
        assert pair["query"] == " ".join(pair["query"].split())
    lengths = [len(pair["positive"].split()) for pair in pairs]
    quarters = statistics.quantiles(lengths, n=4)
    assert min(lengths) >= 12 and quarters[2] > 3 * quarters[0]


def test_a_docstring_is_split_after_its_first_sentence_and_without_its_signature():
    rest = "The rest of it is long enough to be a document, i.e. it has at least a dozen words."
    signed = f"\n    take(a, axis=None)\n\n    Take the elements of\n    an array.  {rest}\n"
    assert split_docstring(signed) == ("Take the elements of an array.", rest)
    assert split_docstring(f"Take the elements of an array\n\n{rest}") == ("Take the elements of an array", rest)
    assert split_docstring(f"Take it. {rest}") is None
    assert split_docstring(f"Take the elements of an array. {rest} Take the elements of an array, again.") is None
