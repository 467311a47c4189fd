"""``fastmaxsim doctor`` with a model, a recipe or a script."""

import pytest

pytest.importorskip("pylate")

from tests.cli.test_cli import launched
from tests.support.command_line import fastmaxsim
from tests.support.examples import script_of
from tests.support.tiny_recipe import tiny, write

GROUPED = "Documents are not packed but encoded in groups of similar length: variable-length attention needs a CUDA"
# On a GPU a model is trained in bf16.
DECIDED = (GROUPED, "Documents are packed")


def first_batch(done) -> list[str]:
    assert not done.stderr.startswith("fastmaxsim"), done.stderr
    return done.stdout.partition(", first batch\n")[2].splitlines()


def test_the_first_batch_of_models_and_of_a_recipe(encoder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe = write(tmp_path, tiny(tmp_path, fast={"enabled": True}))
    before = set(tmp_path.iterdir())
    colbert, splade = encoder("modernbert"), (encoder("bert", masked_lm=True), "--set=model.kind=splade")
    for arguments, name in (((recipe,), "ColBERT"), ((colbert,), "ColBERT"), (splade, "HiddenStates")):
        first, *_ = first_batch(done := fastmaxsim(["doctor", *arguments]))
        assert done.stdout.startswith("Versions\n")
        assert first.startswith(tuple(f"  {name}: {said}" for said in DECIDED))
    assert first_batch(fastmaxsim(["doctor", colbert, "--set", "fast.enabled=false"])) == [
        "  as stock has it: fast.enabled is false"
    ]
    assert set(tmp_path.iterdir()) == before


@pytest.mark.process
@pytest.mark.usefixtures("forked")
def test_a_script_ends_behind_its_first_batch_and_leaves_nothing(encoder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    call = "    result = trainer.train()"
    hook = "model[0].auto_model.layers[0].register_forward_hook(lambda *_: None)"
    broken = (
        f"    {hook}\n    try:\n        result = trainer.train('checkpoint')\n    finally:\n        open('saved', 'w')"
    )
    text = script_of("pylate_contrastive", {"MODEL = encoder()": f"MODEL = {encoder('modernbert')!r}", call: broken})
    (tmp_path / "train.py").write_text(text)
    done = launched("doctor", "-v", "train.py", code="sys.modules['rich'] = None")
    assert [line[:76] for line in first_batch(done)] == [
        "  ColBERT: Documents are encoded with padding, as stock PyLate does: a hook "
    ]
    assert "  pylate.losses.contrastive.Contrastive.forward\n" in done.stdout
    assert [file.name for file in tmp_path.iterdir()] == ["train.py"]
