"""What enable() switches on and off again, and what it and status() say."""

import inspect
import logging
import os
import pickle
import pydoc
import subprocess
import sys
from contextlib import nullcontext

import pytest
import torch

import pylate_fastmaxsim
from pylate_fastmaxsim.integrations.encoding import encode as encoding_encode
from pylate_fastmaxsim.integrations.options import Options, current_options

pytest.importorskip("pylate")

import pylate  # noqa: E402
from pylate import evaluation, losses, models, rank, retrieve, scores, utils  # noqa: E402

from tests.support.compared import assert_equal, batch_of, run  # noqa: E402
from tests.support.models import load_model  # noqa: E402

COLBERT, SIMILARITIES = sys.modules["pylate.scores.colbert"], sys.modules["pylate.scores.similarity_functions"]
WHERE = [(module, "colbert_scores") for module in (scores, COLBERT, SIMILARITIES, sys.modules["pylate.rank.rank"])]
WHERE += [
    *((scores, "colbert_scores_pairwise"), (SIMILARITIES, "colbert_scores_pairwise")),
    *((scores, "colbert_kd_scores"), (sys.modules["pylate.losses.distillation"], "colbert_kd_scores")),
    *((rank, "rerank"), (sys.modules[retrieve.ColBERT.__module__], "rerank")),
    (sys.modules[evaluation.ColBERTTripletEvaluator.__module__], "colbert_scores_pairwise"),
    (sys.modules[evaluation.ColBERTDistillationEvaluator.__module__], "colbert_kd_scores"),
    *((each, "forward") for each in (losses.Contrastive, losses.CachedContrastive, losses.Distillation, models.Dense)),
    *((each, "__call__") for each in (scores.ColBERTScores, utils.ColBERTCollator)),
]


def found():
    values = [inspect.getattr_static(owner, name) for owner, name in WHERE]
    return [(each, getattr(each, "__code__", None), "__wrapped__" in getattr(each, "__dict__", ())) for each in values]


@pytest.fixture(autouse=True)
def off(monkeypatch):
    monkeypatch.delenv("PYLATE_FASTMAXSIM", raising=False)
    before = found()
    yield
    pylate_fastmaxsim.disable()
    assert found() == before


@pytest.mark.process
@pytest.mark.usefixtures("forked")
def test_a_library_that_cannot_be_imported_is_tried_once(tmp_path):
    (tmp_path / "colpali_engine").mkdir()
    (tmp_path / "colpali_engine" / "__init__.py").write_text("print('tried')\nraise RuntimeError('broken')\n")
    program = "import pylate_fastmaxsim as f\nf.enable()\nf.enable(compile=True)"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == "tried\n", done.stderr
    assert "colpali-engine cannot be imported: RuntimeError: broken" in done.stderr


def test_a_function_looks_as_before():
    def look():
        each = scores.colbert_scores
        return inspect.signature(each), inspect.getsource(each), pydoc.plain(pydoc.render_doc(each)), each.__name__

    before = look()
    with pylate_fastmaxsim.enabled():
        assert look() == before


FRESH = """
import pickle, sys
from pylate.scores import colbert_kd_scores, colbert_scores
for name in sys.argv[1:]:
    with open(name, "rb") as file:
        model, loss = pickle.load(file)
    assert model.similarity is colbert_scores and loss.score_metric is colbert_kd_scores
    assert loss.model is model
assert not any(name.startswith("pylate_fastmaxsim") for name in sys.modules)
"""


@pytest.mark.process
@pytest.mark.usefixtures("forked")
def test_models_and_losses_pickle_built_before_and_while_enabled(encoder, tmp_path):
    def build():
        model = load_model(encoder("bert"))
        return model, losses.Distillation(model)

    built = [build()]
    pickled = [pickle.dumps(built[0])]
    with pylate_fastmaxsim.enabled():
        built.append(build())
        pickled += map(pickle.dumps, built)
        assert pickle.loads(pickle.dumps(rank.rerank)) is rank.rerank
        for model, loss in map(pickle.loads, pickled):
            assert model.similarity is scores.colbert_scores and loss.score_metric is scores.colbert_kd_scores
    pickled += map(pickle.dumps, built)
    files = [tmp_path / str(index) for index in range(len(pickled))]
    for file, data in zip(files, pickled, strict=True):
        file.write_bytes(data)
    subprocess.run([sys.executable, "-c", FRESH, *map(str, files)], check=True)


def test_compiled_functions_follow_and_are_compiled_once_for_each():
    graphs = []

    def backend(graph, _inputs):
        graphs.append(graph)
        return graph

    @torch.compile(backend=backend, fullgraph=True)
    def double(queries, documents):
        return 2 * scores.colbert_scores(queries, documents_embeddings=documents)

    embeddings = torch.randn(2, 3, 4), torch.randn(2, 5, 4)
    stock = double(*embeddings)
    for _ in range(3):
        with pylate_fastmaxsim.enabled():
            torch.testing.assert_close(double(*embeddings), stock)
        torch.testing.assert_close(double(*embeddings), stock)
    assert ["maxsim_forward" in str(graph.graph) for graph in graphs] == [False, True]


def test_enabling_again_changes_the_options_and_releases_what_was_prepared_for_the_old_ones(monkeypatch):
    released, before = [], found()
    monkeypatch.setattr(encoding_encode, "release", lambda: released.append(None))
    pylate_fastmaxsim.enable()
    replaced = found()
    assert all(now != then for now, then in zip(replaced, before, strict=True))
    pylate_fastmaxsim.enable()
    assert len(released) == 0
    pylate_fastmaxsim.enable(padding_free=False, stock_masking=True)
    assert found() == replaced and len(released) == 1
    assert current_options() == Options(padding_free=False, compile=False, stock_masking=True)
    pylate_fastmaxsim.disable()
    assert found() == before and current_options() is None and len(released) == 2
    pylate_fastmaxsim.disable()


def test_nested_blocks_restore_what_was_in_force():
    pylate_fastmaxsim.enable(compile=True)
    with pytest.raises(KeyError), pylate_fastmaxsim.enabled():
        with pylate_fastmaxsim.enabled(stock_masking=True):
            assert current_options() == Options(stock_masking=True)
        assert current_options() == Options()
        raise KeyError
    assert current_options() == Options(compile=True)


@pytest.fixture
def said(monkeypatch, capsys):
    monkeypatch.delenv("PYLATE_FASTMAXSIM_QUIET", raising=False)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    return lambda: capsys.readouterr().err


def test_one_line_says_what_is_on(said, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "pylate_fastmaxsim")
    assert pylate_fastmaxsim.enable(stock_masking=True).options.compile is False
    assert len(caplog.messages) == 1
    assert pylate.__version__ in caplog.text and "compile off, stock_masking on" in caplog.text
    assert said().startswith("pylate-fastmaxsim: on, for PyLate 1.") and pylate_fastmaxsim.enable(quiet=True)
    for name in ("PYLATE_FASTMAXSIM_QUIET", "LOCAL_RANK"):
        with monkeypatch.context() as each:
            each.setenv(name, "1")
            pylate_fastmaxsim.enable()
    with pylate_fastmaxsim.enabled(compile=True, pooling="top_k=4"):
        assert pylate_fastmaxsim.status().options.pooling == pylate_fastmaxsim.TopK(4)
        assert pylate_fastmaxsim.status().options.compile
    assert said() == ""
    pylate_fastmaxsim.disable()
    monkeypatch.setenv("PYLATE_FASTMAXSIM", "0")
    state = pylate_fastmaxsim.enable()
    assert said() == "pylate-fastmaxsim: off, by PYLATE_FASTMAXSIM=0\n" and str(state) == "pylate-fastmaxsim: off"


@pytest.mark.parametrize("padding_free, expected", [(True, "Documents are packed"), (False, None)])
def test_the_first_batch_says_how_a_model_is_encoded(encoder, packed, padding_free, expected):
    model = load_model(encoder("modernbert"))
    pylate_fastmaxsim.enable(padding_free=padding_free)
    assert "fused MaxSim" in str(pylate_fastmaxsim.status()) and not pylate_fastmaxsim.status().models
    columns = [model.tokenize(["one", "two words"], is_query=side) for side in (True, False)]
    losses.Contrastive(model)(columns).backward()
    lines = pylate_fastmaxsim.status().models.get("ColBERT", [])
    assert [line.split(":")[0] for line in lines if "Documents" in line] == ([expected] if expected else [])
    assert all(f"  ColBERT: {line}" in str(pylate_fastmaxsim.status()) for line in lines)
    pylate_fastmaxsim.disable()
    assert pylate_fastmaxsim.status().models == {}


def test_the_environment_decides(monkeypatch, caplog):
    caplog.set_level(logging.INFO, "pylate_fastmaxsim")
    stock = scores.colbert_scores.__code__
    for value in ("0", "OFF", "On"):
        monkeypatch.setenv("PYLATE_FASTMAXSIM", value)
        with pylate_fastmaxsim.enabled():
            assert (scores.colbert_scores.__code__ is stock) == (current_options() is None) == (value != "On")
    assert "PYLATE_FASTMAXSIM=OFF" in caplog.text
    monkeypatch.setenv("PYLATE_FASTMAXSIM", "maybe")
    with pytest.raises(ValueError, match="PYLATE_FASTMAXSIM must be .* got 'maybe'"):
        pylate_fastmaxsim.enable()


STOCK_MASKED = {"pooling": pylate_fastmaxsim.TopK(4), "stock_masking": True}
OPTIONS = [
    ({"padding_free": "no"}, TypeError, "padding_free must be True, False or 'always', got 'no'"),
    ({"compile": 1}, TypeError, "compile must be True or False, got 1"),
    ({"paddingfree": True}, TypeError, r"^\w+\(\) has no option 'paddingfree'; did you mean 'padding_free'\?$"),
    ({"ring": True}, TypeError, "has no option 'ring'; its options are padding_free, compile, stock_masking, pooling"),
    ({"pooling": 4}, TypeError, r"enable: pooling must be Max\(\), .* got 4"),
    ({"pooling": "top=4"}, ValueError, "pooling must be max, top_k=K, softmax=T or log_sum_exp=T, .* got 'top=4'"),
    (STOCK_MASKED, ValueError, r"stock_masking=True takes pooling=Max\(\) only, .* got TopK\(k=4\)"),
]


@pytest.mark.parametrize("switch", [pylate_fastmaxsim.enable, pylate_fastmaxsim.enabled])
@pytest.mark.parametrize("options, error, sentence", OPTIONS)
def test_options_that_are_none_are_errors(switch, options, error, sentence):
    with pytest.raises(error, match=sentence), switch(**options) or nullcontext():
        pass
    assert current_options() is None


def test_another_pooling_says_that_indexes_of_others_keep_the_maximum(caplog):
    for pooling in (pylate_fastmaxsim.TopK(4), pylate_fastmaxsim.Max()):
        caplog.clear()
        pylate_fastmaxsim.enable(pooling=pooling)
        assert current_options().pooling == pooling
        said = "indexes built by others (PLAID, fast-plaid, Voyager) still search with the maximum" in caplog.text
        assert said == (pooling == pylate_fastmaxsim.TopK(4))


def test_missing_hosts_are_named_with_the_commands_that_install_them(monkeypatch):
    monkeypatch.setitem(sys.modules, "pylate", None)
    monkeypatch.setitem(sys.modules, "colpali_engine", None)
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    sentence = r"PyLate is not installed: pip install .*\bpylate\b.* colpali-engine is .*: pip install .*\bcolpali\b"
    with pytest.raises(ImportError, match=sentence):
        pylate_fastmaxsim.enable()


@pytest.mark.parametrize("version", ["1.5.0", "2.0.0rc1"])
def test_another_version_of_pylate_is_refused(version, monkeypatch):
    monkeypatch.setitem(sys.modules, "colpali_engine", None)
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    monkeypatch.setattr(pylate, "__version__", version)
    with pytest.raises(ImportError, match=f"from 1.5.1 up to but not including 2; installed is {version}"):
        pylate_fastmaxsim.enable()
    assert current_options() is None


@pytest.mark.process
def test_importing_the_package_imports_no_host_library():
    code = (
        "import sys, pylate_fastmaxsim; pylate_fastmaxsim.enable; "
        "assert not {'pylate', 'transformers', 'sentence_transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("loss_class", [losses.Contrastive, losses.CachedContrastive])
def test_a_loss_outlives_the_end_of_another_threads_block(model, loss_class):
    loss_function, batch = loss_class(model), batch_of(model, columns=1)
    stock = run(loss_function, batch)
    ended = []

    def end(*_):
        ended.append(current_options())
        pylate_fastmaxsim.disable()

    pylate_fastmaxsim.enable(stock_masking=True)
    run(loss_function, batch)  # decides how to encode
    hook = model[0].register_forward_hook(end)
    ours = run(loss_function, batch)
    hook.remove()
    assert ended[0] is not None and current_options() is None
    assert_equal(ours, stock)


def test_of_blocks_that_overlap_the_last_begun_decides_until_it_ends():
    first, second, third = (pylate_fastmaxsim.enabled(stock_masking=value) for value in (False, True, False))
    for block in (first, second, third):
        block.__enter__()
    second.__exit__(None, None, None)
    assert not current_options().stock_masking
    second = pylate_fastmaxsim.enabled(stock_masking=True)
    second.__enter__()
    first.__exit__(None, None, None)
    third.__exit__(None, None, None)
    assert current_options().stock_masking
    second.__exit__(None, None, None)
    assert current_options() is None
