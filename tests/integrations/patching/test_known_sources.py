"""Code of a host that is not that of a known release runs as it is: stock's numbers and a line of log."""

from __future__ import annotations

import functools
import subprocess
import sys
import types

import pytest
from pylate import losses
from pylate.models import ColBERT
from pylate.scores import colbert as scores_module

import pylate_fastmaxsim
from pylate_fastmaxsim.integrations import doctor, enable
from pylate_fastmaxsim.integrations.hosts import find_replacements
from pylate_fastmaxsim.integrations.patching import known_sources
from pylate_fastmaxsim.integrations.patching.known_sources import unknown_part
from tests.support.compared import assert_equal, batch_for, batch_of, run
from tests.support.edited import edited

contrastive_module, cached_module, distillation_module = (
    sys.modules[loss.__module__] for loss in (losses.Contrastive, losses.CachedContrastive, losses.Distillation)
)


def test_the_installed_hosts_are_known():
    assert not [each.left for each in find_replacements() if each.left], (
        "Once the tests pass without this one, run tools/record_sources.py."
    )


def test_all_that_is_known_says_of_which_releases():
    entries = [entry for rows in known_sources.known().values() for entry in rows.values()]
    assert all(entry["releases"] for entry in entries)
    used = {what for entry in entries for what in entry["uses"].values() if isinstance(what, str)}
    assert used <= known_sources.known().keys()


# What is edited: its place, old and new source, and the loss that shows it.
EDITS = {
    "Contrastive": (losses.Contrastive, "forward", "torch.cat(score_chunks, dim=0)", "torch.cat(score_chunks) / 2"),
    "CachedContrastive": (losses.CachedContrastive, "calculate_loss", "scores / self", "scores / 2 / self"),
    "its backward": (cached_module, "_backward_hook", "* grad_output", "* grad_output / 2"),
    "Distillation": (losses.Distillation, "forward", "epsilon = 1e-8", "epsilon = 1"),
    "extract_skiplist_mask": (contrastive_module, "extract_skiplist_mask", "logical_and", "logical_or"),
    "of Distillation": (distillation_module, "extract_skiplist_mask", "logical_and", "logical_or"),
    "skiplist_mask": (ColBERT, "skiplist_mask", "return mask", "return ~mask"),
    "colbert_scores": (scores_module, "colbert_scores", ".sum(axis=-1)", ".sum(axis=-1) / 2"),
    "colbert_kd_scores": (scores_module, "colbert_kd_scores", ".sum(axis=-1)", ".sum(axis=-1).square()"),
}
LOSS_OF = {
    "CachedContrastive": losses.CachedContrastive,
    "its backward": losses.CachedContrastive,
    "Distillation": losses.Distillation,
    "of Distillation": losses.Distillation,
    "colbert_kd_scores": losses.Distillation,
}


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("before", [True, False], ids=["before", "while enabled"])
def test_edited_code_of_pylate_runs(model, monkeypatch, caplog, edit, before):
    owner, name, old, new = EDITS[edit]
    loss_class = LOSS_OF.get(edit, losses.Contrastive)
    batch, labels = batch_for(loss_class, model)
    plain = run(loss_class(model), batch, labels)
    function = edited(getattr(owner, name), old, new)
    replacement = staticmethod(function) if owner is ColBERT else function

    def loss():
        # Distillation holds its scores as a default argument.
        scores = {"score_metric": scores_module.colbert_kd_scores} if edit == "colbert_kd_scores" else {}
        return loss_class(model, **scores)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, replacement)
        stock = run(loss(), batch, labels)
    with pytest.raises(AssertionError):
        assert_equal(plain, stock)
    if before:
        monkeypatch.setattr(owner, name, replacement)
    pylate_fastmaxsim.enable(stock_masking=True)
    monkeypatch.setattr(owner, name, replacement)
    for _ in range(2):
        assert_equal(run(loss(), batch, labels), stock)
    if before or name not in ("forward", "colbert_kd_scores"):
        assert f"{name} is not the code of a release" in caplog.text


class FirstTokens:
    """Document-token matryoshka: the loss of the first tokens of each document."""

    def __init__(self, inner):
        self.inner = inner

    def __call__(self, reps, masks, **options):
        cut = [reps[0], *([part[:, :3] for part in column] for column in reps[1:])]
        return self.inner(cut, [masks[0], *(mask[:, :3] for mask in masks[1:])], **options)


def test_a_step_that_is_set_on_a_loss(model, caplog):
    kind = type("FirstTokens", (FirstTokens,), {"__module__": "pylate.losses.matryoshka"})
    loss = losses.CachedContrastive(model, mini_batch_size=2)
    batch = batch_of(model)
    plain = run(loss, batch)[0]
    loss.calculate_loss = kind(loss.calculate_loss)
    stock = run(loss, batch)
    assert stock[0] != plain
    pylate_fastmaxsim.enable(stock_masking=True)
    for _ in range(2):
        assert_equal(run(loss, batch), stock)
    (line,) = (line for line in caplog.messages if "is not accelerated" in line)
    assert line.startswith("CachedContrastive is not accelerated") and "its calculate_" in line
    # Another loss of this class is.
    caplog.clear()
    run(losses.CachedContrastive(model), batch)
    assert "is not accelerated" not in caplog.text


def test_a_subclass_with_a_step_of_its_own(model, caplog):
    class Louder(losses.CachedContrastive):
        def embed_minibatch(self, *args, **kwargs):
            embeddings, state = super().embed_minibatch(*args, **kwargs)
            return embeddings * 1.1, state

    batch = batch_of(model)
    stock = run(Louder(model), batch)
    pylate_fastmaxsim.enable(stock_masking=True)
    assert_equal(run(Louder(model), batch), stock)
    assert "Louder is not accelerated" in caplog.text and "its embed_minibatch" in caplog.text


@pytest.mark.process
@pytest.mark.smoke
def test_a_pylate_with_one_more_option(encoder):
    """The class is made anew from edited source before the plugin is imported."""
    code = f"""
import inspect
import pylate.losses.contrastive as c
s = inspect.getsource(c.Contrastive)
s = s.replace("temperature: float = 1.0,", "temperature: float = 1.0, mean: bool = False,")
s = s.replace("self.temperature = temperature", "self.temperature = temperature; self.mean = mean")
s = s.replace("scores = torch.cat(score_chunks, dim=0)",
              "scores = torch.cat(score_chunks, dim=0) / (embeddings[0].shape[1] if self.mean else 1)")
exec(s, vars(c))
import pylate_fastmaxsim
from tests.support.compared import batch_of, run
from tests.support.models import load_model
from pylate_fastmaxsim.integrations import doctor, enable
model = load_model({str(encoder("bert"))!r}).double()
batch = batch_of(model, queries=2, columns=1)
loss = c.Contrastive(model, mean=True)
stock = run(loss, batch)[0]
assert run(c.Contrastive(model), batch)[0] != stock
pylate_fastmaxsim.enable(stock_masking=True)
assert run(loss, batch)[0] == stock
(line,) = [line for line in doctor.diagnose()["What falls back here"] if "pylate.losses" in line]
assert line.startswith("pylate.losses.contrastive.Contrastive.forward is not accelerated (running PyLate's own)"), line
assert "pylate.losses.cached_contrastive.CachedContrastive.forward" in doctor.diagnose()["enable() replaces"]
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stderr.count("Contrastive.forward is not accelerated") == 1


def test_a_newer_release_with_the_same_source_is_accelerated(monkeypatch, model, caplog):
    import pylate

    monkeypatch.setattr(pylate, "__version__", "1.9.0")
    pylate_fastmaxsim.enable()
    run(losses.Contrastive(model), batch_of(model))
    assert "is not accelerated" not in caplog.text


def test_names_that_a_release_does_not_have_any_more(monkeypatch, caplog):
    def patches():
        raise ImportError("cannot import name 'RandContext'")

    monkeypatch.setattr("pylate_fastmaxsim.integrations.pylate.losses.patches", patches)
    pylate_fastmaxsim.enable()
    assert "pylate.losses does not accelerate PyLate" in caplog.text and "RandContext" in caplog.text
    assert "pylate.scores.colbert.colbert_scores" in enable._patches.targets
    assert any("RandContext" in line for line in doctor.diagnose()["What falls back here"])


def test_comments_docstrings_and_annotations_change_no_digest():
    sources = [
        'def score(queries):\n    """Docstring."""\n    return queries  # comment\n',
        'def score(queries: torch.Tensor) -> int:\n    """Another."""\n    return queries\n',
        'def score(queries):\n    """Docstring."""\n    return -queries  # comment\n',
    ]
    first, same, other = (known_sources._text(known_sources.ast.parse(text)) for text in sources)
    assert first == same != other


def test_what_stands_for_known_code_and_what_does_not():
    stock = scores_module.colbert_scores
    assert unknown_part(stock) is None
    name = "pylate.scores.colbert.colbert_scores"
    with pylate_fastmaxsim.enabled():
        assert unknown_part(stock) is None
        # By where its code is, whatever a decorator says.
        assert unknown_part(functools.wraps(stock)(lambda *args: 0)).endswith(".colbert_scores")
    unreadable = types.FunctionType(stock.__code__.replace(co_filename="<string>", co_firstlineno=2), stock.__globals__)
    assert unknown_part(unreadable) == name
    moved = types.FunctionType(stock.__code__.replace(co_firstlineno=1), stock.__globals__)
    assert unknown_part(moved) == name
    assert unknown_part(functools.partial(stock)) == "a callable"
