"""Code of a host that is not that of a known release runs as it is: stock's numbers and a line of log."""

import functools
import re
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from pylate import losses, rank
from pylate.models import ColBERT, Dense
from pylate.scores import ColBERTScores
from pylate.scores import colbert as scores_module
from pylate.utils import ColBERTCollator

import pylate_fastmaxsim
from pylate_fastmaxsim.integrations import doctor
from pylate_fastmaxsim.integrations.hosts import find_replacements
from pylate_fastmaxsim.integrations.patching.known_sources import digest
from tests.support.compared import assert_as_stock, assert_equal, batch_for, batch_of, run
from tests.support.edited import edited
from tests.support.models import collated

find_replacements()  # what they run in the place of theirs is PyLate's own, not a test's

contrastive_module, cached_module, distillation_module, rank_module = (
    sys.modules[each.__module__]
    for each in (losses.Contrastive, losses.CachedContrastive, losses.Distillation, rank.rerank)
)


def test_the_installed_hosts_are_known():
    left = [each.left for each in find_replacements() if each.left]
    assert not left, "Once the tests pass without this one, run tools/record_sources.py."


def edit(owner, name: str, old: str, new: str) -> Callable:
    function = edited(getattr(owner, name), old, new)
    return lambda _stock: staticmethod(function) if owner is ColBERT else function


def times(factor: float) -> Callable:
    # As a decorator that says it is what it wraps.
    return lambda stock: functools.wraps(stock)(lambda *args, **kwargs: factor * stock(*args, **kwargs))


def weigh(stock: Callable) -> Callable:
    def forward(*args, **kwargs):
        features = stock(*args, **kwargs)
        embeddings = features["token_embeddings"]
        weights = torch.linspace(1, 4, embeddings.shape[-1], dtype=embeddings.dtype)
        return {**features, "token_embeddings": embeddings * weights}

    return forward


def by_query_length(stock: Callable) -> Callable:
    return lambda self, queries, *args, **kwargs: stock(self, queries, *args, **kwargs) / queries.shape[1]


def shorter(stock: Callable) -> Callable:
    def collate(self, rows):
        batch = stock(self, rows)
        for key, value in batch.items():
            if key.startswith("document") and key.endswith("attention_mask"):
                value[:, 6:] = 0
        return batch

    return collate


CONTRASTIVE, CACHED, DISTILLATION = losses.Contrastive, losses.CachedContrastive, losses.Distillation
EDITED = [
    (CONTRASTIVE, "forward", "torch.cat(score_chunks, dim=0)", "torch.cat(score_chunks) / 2", CONTRASTIVE),
    (CACHED, "calculate_loss", "scores / self", "scores / 2 / self", CACHED),
    (cached_module, "_backward_hook", "* grad_output", "* grad_output / 2", CACHED),
    (DISTILLATION, "forward", "epsilon = 1e-8", "epsilon = 1", DISTILLATION),
    (contrastive_module, "extract_skiplist_mask", "logical_and", "logical_or", CONTRASTIVE),
    (distillation_module, "extract_skiplist_mask", "logical_and", "logical_or", DISTILLATION),
    (ColBERT, "skiplist_mask", "return mask", "return ~mask", CONTRASTIVE),
    (scores_module, "colbert_scores", ".sum(axis=-1)", ".sum(axis=-1) / 2", CONTRASTIVE),
    (scores_module, "colbert_kd_scores", ".sum(axis=-1)", ".sum(axis=-1).square()", DISTILLATION),
]
# Methods that the flag replaces too, and the line that is said once.
WRAPPED = [
    (Dense, "forward", weigh, "pylate.models.Dense.Dense.forward is not accelerated"),
    (ColBERT, "forward", weigh, "ColBERT may change"),
    (ColBERTScores, "__call__", by_query_length, "ColBERTScores.__call__ is not accelerated"),
    (ColBERTCollator, "__call__", shorter, "ColBERTCollator.__call__ is not accelerated"),
]
# What is replaced, by what made of it, the loss that shows it, whether before enable() or after, and the line.
CASES = [
    (owner, name, edit(owner, name, old, new), loss, before, None)
    for owner, name, old, new, loss in EDITED
    for before in (True, False)
]
for _loss in (CONTRASTIVE, CACHED):
    CASES += [(owner, name, make, _loss, True, line) for owner, name, make, line in WRAPPED]
    CASES.append((_loss, "forward", times(3), _loss, True, f"{_loss.__name__}.forward is not accelerated"))


@pytest.mark.parametrize("owner, attribute, make, loss_class, before, line", CASES)
def test_losses_of_replaced_code(model, monkeypatch, caplog, owner, attribute, make, loss_class, before, line):
    def step() -> tuple:
        batch, labels = batch_for(loss_class, model)
        if owner is ColBERTCollator:
            batch = batch_of(model, collate=collated)
        # Distillation holds its scores as a default argument.
        scores = {"score_metric": scores_module.colbert_kd_scores} if attribute == "colbert_kd_scores" else {}
        return run(loss_class(model, **scores), batch, labels)

    plain = step()
    replacement = make(getattr(owner, attribute))
    with monkeypatch.context() as patch:
        patch.setattr(owner, attribute, replacement)
        stock = step()
        with pytest.raises(AssertionError):
            assert_equal(plain, stock)
        if not before:
            patch.undo()
        with pylate_fastmaxsim.enabled(stock_masking=True):
            if not before:
                patch.setattr(owner, attribute, replacement)
            for _ in range(2):
                assert_equal(step(), stock)
            patch.undo()
    if line is None:  # of one that was edited
        line = f"{attribute} is not the code of a release"
        assert line in caplog.text or (not before and attribute in ("forward", "colbert_kd_scores"))
    else:
        assert len([message for message in caplog.messages if line in message]) == 1
    assert_equal(step(), plain)


EMBEDDINGS = torch.randn(1, 3, 4, generator=torch.Generator().manual_seed(0))
DOCUMENTS = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(1))


def results():
    reranked = rank_module.rerank([["a", "b"]], [EMBEDDINGS[0]], [list(DOCUMENTS)])
    groups = ColBERTScores()(EMBEDDINGS, DOCUMENTS[:, None])
    return scores_module.colbert_scores(EMBEDDINGS, DOCUMENTS).tolist(), groups.tolist(), reranked


def test_scores_and_the_reranking_through_them(monkeypatch, caplog):
    plain = results()
    monkeypatch.setattr(scores_module, "colbert_scores", times(-1)(scores_module.colbert_scores))
    monkeypatch.setattr(rank_module, "colbert_scores", scores_module.colbert_scores)
    stock = results()
    assert all(theirs != own for theirs, own in zip(stock, plain, strict=True))
    with pylate_fastmaxsim.enabled():
        assert results() == stock
    for name in ("colbert.colbert_scores", "rerank", "ColBERTScores.__call__"):
        assert len([line for line in caplog.messages if re.search(f"{name} is not accelerated", line)]) == 1
    for module in (rank, rank_module):
        monkeypatch.setattr(module, "rerank", lambda *args, **kwargs: "theirs")
    with pylate_fastmaxsim.enabled():
        assert results()[2] == rank.rerank() == "theirs"
    assert results()[2] == rank.rerank() == "theirs"


class FirstTokens:
    def __init__(self, inner):
        self.inner = inner

    def __call__(self, reps, masks, **options):
        cut = [reps[0], *([part[:, :3] for part in column] for column in reps[1:])]
        return self.inner(cut, [masks[0], *(mask[:, :3] for mask in masks[1:])], **options)


class Louder(losses.CachedContrastive):
    def embed_minibatch(self, *args, **kwargs):
        embeddings, state = super().embed_minibatch(*args, **kwargs)
        return embeddings * 1.1, state


@pytest.mark.parametrize("how", ["set on a loss", "overridden"])
def test_a_step_of_ones_own(model, caplog, how):
    batch = batch_of(model)
    plain = run(losses.CachedContrastive(model, mini_batch_size=2), batch)[0]
    loss = (Louder if how == "overridden" else losses.CachedContrastive)(model, mini_batch_size=2)
    if how == "set on a loss":
        kind = type("FirstTokens", (FirstTokens,), {"__module__": "pylate.losses.matryoshka"})
        loss.calculate_loss = kind(loss.calculate_loss)
    assert run(loss, batch)[0] != plain
    assert_as_stock(loss, batch, times=2)
    (line,) = (line for line in caplog.messages if "is not accelerated" in line)
    assert line.startswith(f"{type(loss).__name__} is not accelerated")
    assert ("its embed_minibatch" if how == "overridden" else "its calculate_") in line
    # Another loss of PyLate's class is.
    caplog.clear()
    run(losses.CachedContrastive(model), batch)
    assert "is not accelerated" not in caplog.text


@pytest.mark.process
@pytest.mark.smoke
@pytest.mark.usefixtures("forked")
def test_code_that_is_changed_before_the_import(encoder):
    """A class with one more option, made anew; one derived from PyLate's; and a method that is put back later."""
    code = f"""
import inspect
import pylate.losses.contrastive as c
from pylate import losses
from pylate.models import Dense
s = inspect.getsource(c.Contrastive)
s = s.replace("temperature: float = 1.0,", "temperature: float = 1.0, mean: bool = False,")
s = s.replace("self.temperature = temperature", "self.temperature = temperature; self.mean = mean")
s = s.replace("scores = torch.cat(score_chunks, dim=0)",
              "scores = torch.cat(score_chunks, dim=0) / (embeddings[0].shape[1] if self.mean else 1)")
exec(s, vars(c))
class CachedContrastive(losses.CachedContrastive):
    pass
losses.CachedContrastive = CachedContrastive
dense = Dense.forward
Dense.forward = lambda self, features: dense(self, features) | {{"token_embeddings": None}}
import pylate_fastmaxsim
pylate_fastmaxsim.enable()
pylate_fastmaxsim.disable()
Dense.forward = dense
from tests.support.compared import batch_of, run
from tests.support.models import load_model
from pylate_fastmaxsim.integrations import doctor
model = load_model({str(encoder("bert"))!r}).double()
batch = batch_of(model, queries=2, columns=1)
loss = c.Contrastive(model, mean=True)
stock = run(loss, batch)[0]
assert run(c.Contrastive(model), batch)[0] != stock
pylate_fastmaxsim.enable(stock_masking=True)
assert Dense.forward is dense
assert run(loss, batch)[0] == stock
run(CachedContrastive(model), batch)
lines = [line for line in doctor.diagnose()["What falls back here"] if "pylate.losses" in line]
assert len(lines) == 1, lines
assert lines[0].startswith("pylate.losses.contrastive.Contrastive.forward is not accelerated (running PyLate's own)")
assert "pylate.losses.cached_contrastive.CachedContrastive.forward" in doctor.diagnose()["enable() replaces"]
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "pylate.losses.contrastive.Contrastive.forward is not accelerated" in done.stderr
    assert "CachedContrastive is not accelerated" not in done.stderr


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
    before = scores_module.colbert_scores.__code__
    pylate_fastmaxsim.enable()
    assert "pylate.losses does not accelerate PyLate" in caplog.text and "RandContext" in caplog.text
    assert scores_module.colbert_scores.__code__ is not before
    assert any("RandContext" in line for line in doctor.diagnose()["What falls back here"])


def test_comments_docstrings_and_annotations_change_no_digest(tmp_path):
    sources = [
        'def score(queries):\n    """Docstring."""\n    return queries  # comment\n',
        'def score(queries: "Tensor") -> int:\n    """Another."""\n    return queries\n',
        'def score(queries):\n    """Docstring."""\n    return -queries  # comment\n',
    ]
    digests = []
    for number, source in enumerate(sources):
        (file := tmp_path / f"{number}.py").write_text(source)
        names: dict = {}
        exec(compile(source, str(file), "exec", dont_inherit=True), names)
        digests.append(digest(names["score"].__code__))
    first, same, other = digests
    assert first == same != other and other is not None
