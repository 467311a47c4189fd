import json
from itertools import islice

import pytest
from accelerate.data_loader import prepare_data_loader
from datasets import Dataset, IterableDataset
from torch.utils.data import DataLoader

from pylate_fastmaxsim.recipes.config.schema import Recipe
from pylate_fastmaxsim.recipes.data import rows as data_rows
from pylate_fastmaxsim.recipes.data.rows import load_rows
from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.kinds.colbert import KIND
from pylate_fastmaxsim.recipes.load import load_recipe
from pylate_fastmaxsim.recipes.models.load import kind_of
from pylate_fastmaxsim.recipes.training.train import train
from tests.support.id_files import write_lines
from tests.support.recipe_kinds import tiny_of
from tests.support.recipe_runs import interrupt, same_model
from tests.support.tiny_recipe import hub_dataset, list_rows, text, write

PAIRS = [{"query": text(n, 4), "positive": f"{text(n, 4 + n % 17)} number {n}"} for n in range(30)]
LISTS = list_rows(20)
TAUGHT = [{"query": text(n, 4), "documents": [text(n, 5), text(n + 1, 6), "a"], "scores": [3, 2, n]} for n in range(20)]
MORE = {"documents": "b", "scores": 0.5}  # of every second row
UNEVEN = [row | {key: row[key] + [more] * (n % 2) for key, more in MORE.items()} for n, row in enumerate(TAUGHT)]


@pytest.fixture
def recipe_of(encoder, tmp_path, monkeypatch):
    # datasets waits for five seconds at the end of Parquet files.
    monkeypatch.setattr("datasets.config.SLEEP_TIME_ON_THREADS_SHUTDOWN", 0, raising=False)

    def make(rows, *overrides, file="rows.jsonl.gz", output="out", kind="colbert", **sections) -> Recipe:
        path = tmp_path / file
        if file.endswith(".parquet"):
            Dataset.from_list(rows).to_parquet(path)
        else:
            write_lines(path, list(map(json.dumps, rows)))
        values = tiny_of(kind, tmp_path, output, evaluation={"rows": 0}, **sections)
        values["data"] = {"source": "files", "files": [str(path)], "streaming": True}
        values["model"] = values["model"] | {"build": None, "name_or_path": encoder("bert")}
        values["training"] |= {"max_steps": 6, "save_steps": 4}
        return load_recipe(write(tmp_path, values), overrides)

    return make


@pytest.mark.parametrize("file", ["rows.jsonl.gz", "rows.parquet"])
def test_all_rows_come_again_and_again_in_an_order_of_the_seed(file, recipe_of):
    stream = load_rows(recipe_of(PAIRS, file=file), KIND)
    assert isinstance(stream, IterableDataset) and stream.column_names == ["query", "positive"]
    rows = [row["positive"] for row in islice(stream, 60)]
    assert sorted(rows[:30]) == sorted(row["positive"] for row in PAIRS) and rows[:30] == rows[30:]
    assert rows[:30] != [row["positive"] for row in PAIRS]
    assert rows[:30] != [row["positive"] for row in islice(load_rows(recipe_of(PAIRS, "data.seed=1"), KIND), 30)]


TABLES = [(LISTS, ["data.negatives_per_query=2"]), (TAUGHT, []), (UNEVEN, ["data.n_ways=3"]), (PAIRS, [])]


@pytest.mark.parametrize(("rows", "overrides"), TABLES)
def test_the_rows_are_those_of_a_table(rows, overrides, recipe_of, monkeypatch):
    loss = "distillation" if "scores" in rows[0] else "contrastive"
    monkeypatch.setattr(data_rows, "BUFFER", 1)
    stream = load_rows(recipe_of(rows, *overrides, loss={"name": loss}), KIND)
    table = load_rows(recipe_of(rows, *overrides, "data.streaming=false", loss={"name": loss}), KIND)
    assert stream.column_names == table.column_names
    assert list(islice(stream, len(table))) == table.to_list()


def test_a_data_set_of_the_hub_is_streamed(recipe_of, tmp_path):
    data = hub_dataset(tmp_path / "data", pair=PAIRS)
    section = f"data={{source: hub, name: {data}, config: pair, streaming: true, columns: [positive, query]}}"
    recipe = recipe_of(PAIRS, section, kind="splade")
    stream = load_rows(recipe, kind_of(recipe.model))
    assert stream.column_names == ["positive", "query"]
    assert sorted(row["query"] for row in islice(stream, 30)) == sorted(row["query"] for row in PAIRS)


def test_an_interrupted_run_goes_on_with_the_next_batch(recipe_of, tmp_path):
    overrides = ["training.dataloader_num_workers=2", "data.negatives_per_query=2"]
    whole = train(recipe_of(LISTS, *overrides, output="whole"))
    assert len(whole["losses"]) == 6
    recipe = recipe_of(LISTS, *overrides)
    assert interrupt(recipe, step=3) == "checkpoint-4"
    resumed = train(recipe)
    assert resumed["losses"] == whole["losses"] and resumed["resumed_from"] == "checkpoint-4"
    assert same_model(tmp_path / "whole", tmp_path / "out")
    # Of a distillation accelerate would cut a column of 12 documents to its batch of 4 rows.
    taught = recipe_of(TAUGHT, "training.max_steps=1", output="taught", loss={"name": "distillation"})
    assert train(taught)["losses"][0][1] > 0


def test_processes_read_different_rows(recipe_of):
    stream = load_rows(recipe_of(PAIRS), KIND)
    read = []
    for rank in range(2):
        batches = DataLoader(stream, batch_size=5, drop_last=True)
        loader = prepare_data_loader(batches, num_processes=2, process_index=rank, dispatch_batches=False)
        read.append([row for batch in islice(loader, 2) for row in batch["positive"]])
    together = [row["positive"] for row in islice(stream, 20)]
    assert read[0] + read[1] == [*together[:5], *together[10:15], *together[5:10], *together[15:]]


@pytest.mark.parametrize(
    ("rows", "override", "sentence"),
    [
        (PAIRS, "training.per_device_train_batch_size=40", "training.per_device_train_batch_size must be at most 30"),
        ([PAIRS[0], {"query": "q", "positive": 3}], "data.seed=1", "data: a column holds values of several types in "),
        ([], "data.seed=1", "data.* there are no rows|data cannot be loaded"),
    ],
)
def test_what_cannot_be_streamed_is_one_sentence(rows, override, sentence, recipe_of):
    with pytest.raises(RecipeError, match=f"^{sentence}") as error:
        load_rows(recipe_of(rows, override), KIND)
    assert "\n" not in str(error.value)


def test_a_row_that_does_not_fit_ends_the_training_with_one_sentence(recipe_of, monkeypatch):
    monkeypatch.setattr(data_rows, "ROWS_AT_ONCE", 8)
    monkeypatch.setattr(data_rows, "BUFFER", 8)
    rows = [*PAIRS[:20], {"query": "q", "positive": None}]
    for workers in (0, 1):
        said = r"^data.columns: 'positive' must hold a text in every row, .* \(in the rows from number 16 on\).$"
        with pytest.raises(RecipeError, match=said):
            train(recipe_of(rows, f"training.dataloader_num_workers={workers}", output=f"out-{workers}"))
