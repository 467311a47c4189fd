import functools
import inspect
import logging
import pickle
import pydoc
import subprocess
import sys

import pytest
import torch

import pylate_fastmaxsim
from pylate_fastmaxsim.integrations.options import Options, current_options

pytest.importorskip("pylate")

import pylate  # noqa: E402
from compared import assert_equal, batch_of, run  # noqa: E402
from models import features, load_model, sentences  # noqa: E402
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
]


def found():
    """What stands there and, of a function, what it runs."""
    values = [inspect.getattr_static(owner, name) for owner, name in WHERE]
    return [(value, getattr(value, "__code__", None)) for value in values]


@pytest.fixture(autouse=True)
def off(monkeypatch):
    monkeypatch.delenv("PYLATE_FASTMAXSIM", raising=False)
    before = found()
    yield
    pylate_fastmaxsim.disable()
    assert found() == before


def test_everything_is_replaced_and_put_back():
    before = found()
    pylate_fastmaxsim.enable()
    assert all(now != then for now, then in zip(found(), before, strict=True))
    pylate_fastmaxsim.disable()
    assert found() == before
    pylate_fastmaxsim.disable()


@pytest.mark.process
def test_a_library_that_cannot_be_imported_is_tried_once(tmp_path):
    (tmp_path / "colpali_engine").mkdir()
    (tmp_path / "colpali_engine" / "__init__.py").write_text("print('tried')\nraise RuntimeError('broken')\n")
    program = (
        "import sys\nsys.path.insert(0, sys.argv[1])\nimport pylate_fastmaxsim\n"
        "pylate_fastmaxsim.enable()\npylate_fastmaxsim.enable(grad_filter='auto')\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == "tried\n", done.stderr
    assert "colpali-engine is not accelerated: colpali-engine cannot be imported: RuntimeError: broken." in done.stderr


def holders():
    """All the ways to hold a function that are no attribute of a module."""
    score = scores.colbert_scores

    def default(queries, documents, function=score):
        return function(queries, documents)

    class Holder:
        method = staticmethod(score)

    model = models.ColBERT.__new__(models.ColBERT)
    torch.nn.Module.__init__(model)
    model.similarity_fn_name = "MaxSim"
    return [
        *(score, default, functools.partial(score, backend="auto"), lambda *embeddings: score(*embeddings)),
        *({"MaxSim": score}["MaxSim"], Holder.method, model.similarity, model._similarity),
    ]


def test_whoever_holds_a_function_follows_from_before_and_from_while_it_was_enabled(calls):
    embeddings = [[[1.0, 0.0]]], [[[0.5, 0.5], [1.0, 0.0]]]
    held = holders()
    for _ in range(2):
        with pylate_fastmaxsim.enabled():
            held += holders()
            assert all(score(*embeddings).item() == 1 for score in held)
            assert len(calls) == len(held)
            calls.clear()
        assert all(score(*embeddings).item() == 1 for score in held)
        assert not calls


def test_an_evaluator_that_was_used_before_follows(encoder, calls):
    model = load_model(encoder("bert")).eval()
    evaluator = evaluation.PyLateInformationRetrievalEvaluator(
        queries={"q": "sand"}, corpus={"a": "waves sort sand", "b": "the sky"}, relevant_docs={"q": {"a"}}
    )
    stock = evaluator(model)
    assert not calls
    with pylate_fastmaxsim.enabled():
        assert evaluator(model) == stock
        assert len(calls) == 1
    assert evaluator(model) == stock
    assert len(calls) == 1


def test_functions_keep_name_signature_help_and_pickle():
    functions = [scores.colbert_scores, scores.colbert_scores_pairwise, scores.colbert_kd_scores, rank.rerank]

    def look(function):
        help_text = pydoc.plain(pydoc.render_doc(function))
        return function.__name__, inspect.signature(function), inspect.getsource(function), help_text

    before = list(map(look, functions))
    with pylate_fastmaxsim.enabled():
        assert list(map(look, functions)) == before
        assert pickle.loads(pickle.dumps(functions)) == functions
    assert list(map(look, functions)) == before


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
def test_models_and_losses_pickle_built_before_and_while_enabled(encoder, tmp_path):
    def build():
        model = load_model(encoder("bert"))
        return model, losses.Distillation(model)

    def loads(pickled):
        for data in pickled:
            model, loss = pickle.loads(data)
            assert model.similarity is scores.colbert_scores and loss.score_metric is scores.colbert_kd_scores

    built = [build()]
    pickled = [pickle.dumps(built[0])]
    with pylate_fastmaxsim.enabled():
        built.append(build())
        pickled += map(pickle.dumps, built)
        loads(pickled)
    pickled += map(pickle.dumps, built)
    loads(pickled)
    files = [tmp_path / str(index) for index in range(len(pickled))]
    for file, data in zip(files, pickled, strict=True):
        file.write_bytes(data)
    subprocess.run([sys.executable, "-c", FRESH, *map(str, files)], check=True)


@pytest.mark.parametrize("fullgraph", [True, False])
def test_compiled_functions_follow_and_are_compiled_once_for_each(fullgraph):
    graphs = []

    def backend(graph, _inputs):
        graphs.append(graph)
        return graph

    @torch.compile(backend=backend, fullgraph=fullgraph)
    def double(queries, documents):
        return 2 * scores.colbert_scores(queries, documents_embeddings=documents)

    embeddings = torch.randn(2, 3, 4), torch.randn(2, 5, 4)
    stock = double(*embeddings)
    for _ in range(3):
        with pylate_fastmaxsim.enabled():
            torch.testing.assert_close(double(*embeddings), stock)
        torch.testing.assert_close(double(*embeddings), stock)
    assert ["maxsim_forward" in str(graph.graph) for graph in graphs] == [False, True]


def test_enabling_again_changes_the_options_only():
    pylate_fastmaxsim.enable()
    replaced = found()
    pylate_fastmaxsim.enable(padding_free=False, stock_masking=True)
    assert found() == replaced
    assert current_options() == Options(padding_free=False, compile=False, stock_masking=True)
    pylate_fastmaxsim.disable()
    assert current_options() is None


def test_nested_blocks_restore_what_was_in_force():
    stock = scores.colbert_scores.__code__
    with pylate_fastmaxsim.enabled():
        with pylate_fastmaxsim.enabled(stock_masking=True):
            assert current_options().stock_masking
        assert current_options() == Options()
        assert scores.colbert_scores.__code__ is not stock
    assert current_options() is None
    assert scores.colbert_scores.__code__ is stock
    pylate_fastmaxsim.enable(compile=True)
    with pytest.raises(KeyError), pylate_fastmaxsim.enabled():
        raise KeyError
    assert current_options() == Options(compile=True)


def test_changing_options_releases_what_was_prepared_for_the_old_ones(monkeypatch):
    from pylate_fastmaxsim.integrations.encoding import encode as encoding_encode

    released = []
    monkeypatch.setattr(encoding_encode, "release", lambda: released.append(None))
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


@pytest.mark.parametrize("value", ["0", "OFF"])
def test_the_environment_forbids_it(value, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "pylate_fastmaxsim")
    monkeypatch.setenv("PYLATE_FASTMAXSIM", value)
    stock = scores.colbert_scores.__code__
    with pylate_fastmaxsim.enabled():
        assert scores.colbert_scores.__code__ is stock
        assert current_options() is None
    assert f"PYLATE_FASTMAXSIM={value}" in caplog.text


def test_the_environment_allows_it(monkeypatch):
    monkeypatch.setenv("PYLATE_FASTMAXSIM", "On")
    with pylate_fastmaxsim.enabled():
        assert current_options() is not None


def test_nonsense_in_the_environment_is_an_error(monkeypatch):
    monkeypatch.setenv("PYLATE_FASTMAXSIM", "maybe")
    with pytest.raises(ValueError, match="PYLATE_FASTMAXSIM must be .* got 'maybe'"):
        pylate_fastmaxsim.enable()


@pytest.mark.parametrize("name, value", [("padding_free", "no"), ("compile", None), ("ring", 1)])
def test_an_option_that_is_not_a_bool_is_an_error(name, value):
    allowed = "True, False or 'always'" if name == "padding_free" else "True or False"
    with pytest.raises(TypeError, match=f"{name} must be {allowed}, got {value!r}"):
        pylate_fastmaxsim.enable(**{name: value})
    with pytest.raises(TypeError, match=f"{name} must be {allowed}"), pylate_fastmaxsim.enabled(**{name: value}):
        pass
    assert current_options() is None


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
    assert current_options() is None


@pytest.mark.process
def test_importing_the_package_imports_no_host_library():
    code = (
        "import sys, pylate_fastmaxsim; pylate_fastmaxsim.enable; "
        "assert not {'pylate', 'transformers', 'sentence_transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("loss_class", [losses.Contrastive, losses.CachedContrastive, losses.Distillation])
def test_a_loss_outlives_the_end_of_another_threads_block(model, loss_class):
    loss_function = loss_class(model)
    batch, labels = batch_of(model, columns=1), torch.rand(6, 1, dtype=torch.float64)
    if loss_class is losses.Distillation:
        batch[1] = features(model, sentences(6), sentences(18, seed=1))[1]
        labels = torch.rand(6, 3, dtype=torch.float64)
    stock = run(loss_function, batch, labels)
    ended = []

    def end(*_):
        ended.append(current_options())
        pylate_fastmaxsim.disable()

    pylate_fastmaxsim.enable(stock_masking=True)
    run(loss_function, batch, labels)  # decides how to encode
    hook = model[0].register_forward_hook(end)
    ours = run(loss_function, batch, labels)
    hook.remove()
    assert ended[0] is not None and current_options() is None
    assert_equal(ours, stock)


@pytest.mark.parametrize("name", ["colbert_scores", "colbert_kd_scores", "ColBERTScores"])
def test_scores_outlive_the_end_of_another_threads_block(name, calls, monkeypatch):
    from pylate_fastmaxsim.integrations.pylate import scores as pylate_scores

    # Masked tokens, which count with 0 in stock's scores, and negative similarities.
    documents = -torch.rand(2, *([3] if name != "colbert_scores" else []), 5, 4)
    arguments = torch.rand(2, 3, 4), documents, None, torch.arange(5).expand(documents.shape[:-1]) < 3
    function = scores.ColBERTScores() if name == "ColBERTScores" else getattr(scores, name)
    stock = function(*arguments)
    check = pylate_scores.check

    def end(*args):
        pylate_fastmaxsim.disable()
        return check(*args)

    monkeypatch.setattr(pylate_scores, "check", end)
    pylate_fastmaxsim.enable(stock_masking=True)
    torch.testing.assert_close(function(*arguments), stock)
    assert len(calls) == 1 and current_options() is None


def test_of_blocks_that_overlap_the_last_begun_decides_until_it_ends():
    def options():
        return None if (found := current_options()) is None else found.stock_masking

    first, second, third = (pylate_fastmaxsim.enabled(stock_masking=value) for value in (False, True, False))
    first.__enter__()
    second.__enter__()
    third.__enter__()
    second.__exit__(None, None, None)
    assert options() is False
    second = pylate_fastmaxsim.enabled(stock_masking=True)
    second.__enter__()
    first.__exit__(None, None, None)
    third.__exit__(None, None, None)
    assert options() is True
    second.__exit__(None, None, None)
    assert options() is None
