"""Docstring pairs and models from scratch are made once, and again when a run starts over."""

from __future__ import annotations

from pathlib import Path

from pylate import models
from transformers.trainer import TRAINER_STATE_NAME

from pylate_fastmaxsim.recipes.load import load_recipe
from pylate_fastmaxsim.recipes.training.inputs import prepare
from tests.support.power_cut import states
from tests.support.tiny_recipe import tiny, write


def test_other_rows_are_prepared_when_a_run_starts_over(tmp_path, monkeypatch):
    package = tmp_path / "documented"
    package.mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    rest = "The rest is long enough to be a document, for it has more than a dozen words."
    code = "".join(f'def f{i}():\n    """One number {i} of them all.\n\n    {rest} {i}"""\n' for i in range(40))
    values = tiny(tmp_path, evaluation={"rows": 0}) | {"data": {"source": "docstrings", "packages": ["documented"]}}
    recipe = load_recipe(write(tmp_path, values))

    def prepared(code: str, anew: bool) -> dict[str, bytes]:
        (package / "__init__.py").write_text(code)
        made = prepare(recipe, anew)
        files = [made.data.files[0], f"{made.model.name_or_path}/tokenizer.json"]
        return [open(file, "rb").read() for file in files]

    first = prepared(code, False)
    changed = code.replace("dozen", "score")
    assert prepared(changed, False) == first
    other = prepared(changed, True)
    assert other[0] != first[0] and other[1] != first[1]
    assert prepared(code, True) == first


def test_kills_and_power_cuts_leave_checkpoints_with_what_they_need(tmp_path, monkeypatch):
    package = tmp_path / "documented"
    package.mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    values = tiny(tmp_path, evaluation={"rows": 0}) | {"data": {"source": "docstrings", "packages": ["documented"]}}
    recipe, out = load_recipe(write(tmp_path, values)), tmp_path / "out"
    rest = "The rest is long enough to be a document, for it has more than a dozen words."

    def prepared(word: str, anew: bool) -> dict[str, bytes | None]:
        code = "".join(f'def f{i}():\n    """One number {i} {word}.\n\n    {rest} {i}"""\n' for i in range(40))
        (package / "__init__.py").write_text(code)
        made = Path(prepare(recipe, anew).data.files[0]).parent
        paths = made.rglob("*")
        return {str(path.relative_to(out)): path.read_bytes() if path.is_file() else None for path in paths}

    old, new = prepared("of all", False), {}
    (out / "checkpoint-4").mkdir()
    (out / "checkpoint-4" / TRAINER_STATE_NAME).write_text("{}")
    found = states(out, lambda: new.update(prepared("of them", True)), cuts=5)
    assert new != old and not (out / "checkpoint-4").exists()
    for _, state in found:
        held = {name: content for name, content in state.items() if name in old.keys() | new.keys()}
        assert held == old or (held == new and f"checkpoint-4/{TRAINER_STATE_NAME}" not in state)


def test_a_built_model_is_the_same_each_time(tmp_path):
    files = []
    for place in ("a", "b"):
        prepared = prepare(load_recipe(write(tmp_path, tiny(tmp_path, place))))
        assert prepare(load_recipe(write(tmp_path, tiny(tmp_path, place)))) == prepared
        files.append(Path(prepared.model.name_or_path))
    assert [path.name for path in (tmp_path / "a" / "prepared").iterdir()] == [files[0].parent.name]
    for name in ("model.safetensors", "1_Dense/model.safetensors", "tokenizer.json"):
        assert (files[0] / name).read_bytes() == (files[1] / name).read_bytes()
    model = models.ColBERT(str(files[0]), device="cpu")
    assert model.tokenizer.unk_token_id not in model.skiplist
    assert (model.query_length, model.document_length) == (8, 24)
