import os
from pathlib import Path

import pytest

from pylate_fastmaxsim.recipes.comparison.compare import compare
from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.files import prepare_file
from pylate_fastmaxsim.recipes.load import load_recipe
from pylate_fastmaxsim.recipes.mining.mine import mine
from pylate_fastmaxsim.recipes.training.train import train
from tests.support.case_tables import case_table
from tests.support.tiny_recipe import tiny, write


def test_an_output_is_a_regular_file_that_is_no_input(tmp_path):
    (tmp_path / "corpus.jsonl").write_text("{}")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    os.link(tmp_path / "corpus.jsonl", tmp_path / "other-name.jsonl")
    (tmp_path / "model").mkdir()
    inputs = (None, tmp_path / "corpus.jsonl", tmp_path / "model", Path("name/on-the-hub"))
    for name, reason in {
        "corpus.jsonl": "it is what this command reads",
        "other-name.jsonl": "it is what this command reads",
        "model/config.json": "it is in .*/model, which this command reads",
        "link": "it is a link",
        ".": "it is a folder",
        "/dev/null": "it is no regular file",
        "x" * 300: "File name too long",
    }.items():
        with pytest.raises(RecipeError, match=f"^--run .* cannot be written: {reason}"):
            prepare_file("--run", tmp_path / name, inputs)
    prepare_file("--run", tmp_path / "runs" / "run", inputs)


@case_table("""
name | override | said
train | data.files=[OUT/train.json] | output_dir OUT/train.json .* what this command reads
train | model={name_or_path: OUT/model} | OUT/model lies in output_dir, where this training replaces it
train | evaluation.beir=OUT | output_dir OUT/train.json .* in OUT, which this command reads
compare | data.files=[OUT/compare.json] | output_dir OUT/compare.json .* what this command reads
mine | mining.pairs.name=OUT | data.name OUT/queries.parquet .* in OUT, which this command reads
mine | mining.teacher=OUT | data.name OUT/queries.parquet .* in OUT, which this command reads
""")
def test_a_recipe_replaces_nothing_that_it_reads(name, override, said, tmp_path):
    run = {"train": train, "compare": compare, "mine": mine}[name]
    out = tmp_path / "out"
    (out / "model").mkdir(parents=True)
    for name in ("train.json", "compare.json"):
        (out / name).write_text('{"query": "a", "positive": "b"}\n' * 60)
    values = tiny(tmp_path, evaluation={"rows": 0})
    if run is mine:
        mining = {"pairs": {"source": "hub", "name": "pairs"}, "teacher": "teacher", "num_negatives": 1}
        values |= {"model": {"name_or_path": "name/on-the-hub"}, "loss": {"name": "distillation"}, "mining": mining}
        values["data"] = {"source": "distillation", "name": str(out)}
    recipe = load_recipe(write(tmp_path, values), [override.replace("OUT", str(out))])
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()}
    with pytest.raises(RecipeError, match=said.replace("OUT", str(out))):
        run(recipe)
    assert {path: path.stat().st_mtime_ns for path in before} == before
