import inspect
import logging
import pickle
import subprocess
import sys
from types import ModuleType

import pytest

import pylate_fastmaxsim
from pylate_fastmaxsim.integrations import switch

pytest.importorskip("pylate")

import pylate  # noqa: E402
from pylate import evaluation, losses, models, rank, retrieve, scores, utils  # noqa: E402

WHERE = [
    (scores, "colbert_scores"),
    (sys.modules["pylate.scores.colbert"], "colbert_scores"),
    (sys.modules["pylate.scores.similarity_functions"], "colbert_scores"),
    (sys.modules["pylate.rank.rank"], "colbert_scores"),
    (scores, "colbert_scores_pairwise"),
    (sys.modules["pylate.scores.similarity_functions"], "colbert_scores_pairwise"),
    (scores, "colbert_kd_scores"),
    (sys.modules["pylate.losses.distillation"], "colbert_kd_scores"),
    (scores.ColBERTScores, "__call__"),
    (rank, "rerank"),
    (sys.modules[retrieve.ColBERT.__module__], "rerank"),
    (sys.modules[evaluation.ColBERTTripletEvaluator.__module__], "colbert_scores_pairwise"),
    (sys.modules[evaluation.ColBERTDistillationEvaluator.__module__], "colbert_kd_scores"),
    (losses.Contrastive, "forward"),
    (losses.CachedContrastive, "forward"),
    (losses.Distillation, "forward"),
    (utils.ColBERTCollator, "__call__"),
    (models.Dense, "forward"),
    (models.ColBERT, "similarity"),
    (models.ColBERT, "similarity_pairwise"),
]


def found():
    return [inspect.getattr_static(owner, name) for owner, name in WHERE]


@pytest.fixture(autouse=True)
def off(monkeypatch):
    monkeypatch.delenv("PYLATE_FASTMAXSIM", raising=False)
    before = found()
    yield
    pylate_fastmaxsim.disable()
    assert all(now is then for now, then in zip(found(), before, strict=True))
    assert "similarity" not in vars(models.ColBERT)


def user_module(monkeypatch):
    module = ModuleType("user_script")
    exec("from pylate.scores import colbert_scores as score\nfrom pylate.rank import rerank", vars(module))
    monkeypatch.setitem(sys.modules, "user_script", module)
    return module


def test_everything_is_replaced_and_put_back():
    before = found()
    pylate_fastmaxsim.enable()
    assert all(now is not then for now, then in zip(found(), before, strict=True))
    pylate_fastmaxsim.disable()
    assert all(now is then for now, then in zip(found(), before, strict=True))
    pylate_fastmaxsim.disable()


def test_symbols_captured_before_and_after_are_covered(monkeypatch):
    before = user_module(monkeypatch)
    stock = before.score, before.rerank
    pylate_fastmaxsim.enable()
    assert before.score is scores.colbert_scores is not stock[0]
    after = user_module(monkeypatch)
    monkeypatch.setitem(sys.modules, "user_script_before", before)
    assert after.rerank is before.rerank is not stock[1]
    pylate_fastmaxsim.disable()
    assert (before.score, before.rerank) == (after.score, after.rerank) == stock


def test_replacements_keep_name_signature_docstring_and_pickle():
    functions = [scores.colbert_scores, scores.colbert_scores_pairwise, scores.colbert_kd_scores, rank.rerank]
    with pylate_fastmaxsim.enabled():
        replacements = [scores.colbert_scores, scores.colbert_scores_pairwise, scores.colbert_kd_scores, rank.rerank]
        for stock, replacement in zip(functions, replacements, strict=True):
            assert replacement.__wrapped__ is stock
            assert inspect.signature(replacement) == inspect.signature(stock)
            assert (replacement.__name__, replacement.__doc__) == (stock.__name__, stock.__doc__)
            assert pickle.loads(pickle.dumps(replacement)) is replacement


def test_enabling_again_changes_the_options_only():
    pylate_fastmaxsim.enable()
    replaced = found()
    pylate_fastmaxsim.enable(padding_free=False, stock_masking=True)
    assert found() == replaced
    assert switch.options() == switch.Options(padding_free=False, compile=False, stock_masking=True)
    pylate_fastmaxsim.disable()
    assert switch.options() is None


def test_nested_blocks_restore_what_was_in_force():
    stock = scores.colbert_scores
    with pylate_fastmaxsim.enabled():
        with pylate_fastmaxsim.enabled(stock_masking=True):
            assert switch.options().stock_masking
        assert switch.options() == switch.Options()
        assert scores.colbert_scores is not stock
    assert switch.options() is None
    assert scores.colbert_scores is stock
    pylate_fastmaxsim.enable(compile=True)
    with pytest.raises(KeyError), pylate_fastmaxsim.enabled():
        raise KeyError
    assert switch.options() == switch.Options(compile=True)


def test_changing_options_releases_what_was_prepared_for_the_old_ones(monkeypatch):
    from pylate_fastmaxsim.integrations import packing

    released = []
    monkeypatch.setattr(packing, "release", lambda: released.append(None))
    pylate_fastmaxsim.enable()
    pylate_fastmaxsim.enable()
    assert len(released) == 0
    pylate_fastmaxsim.enable(compile=True)
    assert len(released) == 1
    pylate_fastmaxsim.disable()
    assert len(released) == 2


def test_enable_says_what_it_switched_on_in_one_line(caplog):
    caplog.set_level(logging.INFO, "pylate_fastmaxsim")
    pylate_fastmaxsim.enable(stock_masking=True)
    assert len(caplog.messages) == 1
    assert pylate.__version__ in caplog.text
    assert "padding_free on, compile off, stock_masking on, grad_filter off, ring off, fused_head on" in caplog.text


@pytest.mark.parametrize("value", ["0", "false", "OFF", "no"])
def test_the_environment_forbids_it(value, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "pylate_fastmaxsim")
    monkeypatch.setenv("PYLATE_FASTMAXSIM", value)
    stock = scores.colbert_scores
    with pylate_fastmaxsim.enabled():
        assert scores.colbert_scores is stock
        assert switch.options() is None
    assert f"PYLATE_FASTMAXSIM={value}" in caplog.text


@pytest.mark.parametrize("value", ["1", "true", "On", "yes", ""])
def test_the_environment_allows_it(value, monkeypatch):
    monkeypatch.setenv("PYLATE_FASTMAXSIM", value)
    with pylate_fastmaxsim.enabled():
        assert switch.options() is not None


def test_nonsense_in_the_environment_is_an_error(monkeypatch):
    monkeypatch.setenv("PYLATE_FASTMAXSIM", "maybe")
    with pytest.raises(ValueError, match="PYLATE_FASTMAXSIM must be .* got 'maybe'"):
        pylate_fastmaxsim.enable()


@pytest.mark.parametrize("name", ["padding_free", "compile", "stock_masking", "ring", "fused_head"])
@pytest.mark.parametrize("value", ["no", None, 1])
def test_an_option_that_is_not_a_bool_is_an_error(name, value):
    with pytest.raises(TypeError, match=f"{name} must be True or False, got {value!r}"):
        pylate_fastmaxsim.enable(**{name: value})
    with pytest.raises(TypeError, match=f"{name} must be True or False"), pylate_fastmaxsim.enabled(**{name: value}):
        pass
    assert switch.options() is None


def test_missing_hosts_are_named_with_the_commands_that_install_them(monkeypatch):
    monkeypatch.setitem(sys.modules, "pylate", None)
    monkeypatch.setitem(sys.modules, "colpali_engine", None)
    with pytest.raises(ImportError, match=r'pip install "pylate-fastmaxsim\[pylate\]".*\[colpali\]"'):
        pylate_fastmaxsim.enable()


@pytest.mark.parametrize("version", ["1.5.0", "2.0.0", "2.0.0rc1"])
def test_another_version_of_pylate_is_refused(version, monkeypatch):
    monkeypatch.setitem(sys.modules, "colpali_engine", None)
    monkeypatch.setattr(pylate, "__version__", version)
    with pytest.raises(ImportError, match=f"from 1.5.1 up to but not including 2; installed is {version}"):
        pylate_fastmaxsim.enable()
    assert switch.options() is None


def test_importing_the_package_imports_no_host_library():
    code = (
        "import sys, pylate_fastmaxsim; pylate_fastmaxsim.enable; "
        "assert not {'pylate', 'transformers', 'sentence_transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
