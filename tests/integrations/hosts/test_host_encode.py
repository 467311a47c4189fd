"""``encode`` of the hosts under the flag: what stock returns, from fewer calls of the encoder."""

import threading
from concurrent.futures import ThreadPoolExecutor
from inspect import signature

import pytest
import torch

import pylate_fastmaxsim
from pylate_fastmaxsim.integrations.hosts import find_replacements
from pylate_fastmaxsim.integrations.inference.tokenizing import FEW_TEXTS
from tests.support.hosts import each_host, host_of
from tests.support.models import load_model, sentences

# As many as have another tokenizer; one is empty, one has punctuation only, one is cut off.
TEXTS = [*sentences(FEW_TEXTS, 9, seed=3), "", "., !", *sentences(1, 90, seed=4)]
# Of each host: names of calls and their options.
CALLS = {
    "PyLate": [
        {"is_query": False},
        {"is_query": True},
        {"is_query": False, "convert_to_tensor": True, "normalize_embeddings": False},
        {"is_query": False, "padding": True, "prompt": "title: "},
        {"is_query": False, "pool_factor": 2, "convert_to_numpy": False},
        {"is_query": False, "pool_factor": 3, "protected_tokens": 0},
        {"is_query": False, "output_value": None},
    ],
    "MultiVectorEncoder": [
        {"task": "document"},
        {"task": "query", "convert_to_numpy": True},
        {"prompt": "title: ", "normalize_embeddings": False},
        {"task": "document", "output_value": None},
        {"task": "document", "token_pooling": 2, "convert_to_numpy": True},
        {"task": "query", "token_pooling": 2},
        {"task": "document", "token_pooling": 1.5, "output_value": None},
    ],
    "SparseEncoder": [
        {},
        {"save_to_cpu": True, "max_active_dims": 3},
        {"convert_to_sparse_tensor": False, "prompt": "title: "},
        {"convert_to_tensor": False},
    ],
}


def assert_same(ours: object, stock: object) -> None:
    assert type(ours) is type(stock)
    if isinstance(stock, list):
        assert len(ours) == len(stock)
        for own, other in zip(ours, stock, strict=True):
            assert_same(own, other)
    elif isinstance(stock, dict):
        assert ours.keys() == stock.keys()
        for key in stock:
            assert_same(ours[key], stock[key])
    elif hasattr(stock, "dtype"):
        ours, stock = (torch.as_tensor(each) for each in (ours, stock))
        # Of a tensor made in inference mode PyTorch makes no other sparse layout, and no gradients.
        assert (ours.layout, ours.dtype) == (stock.layout, stock.dtype)
        assert stock.is_inference() or not ours.is_inference()
        torch.testing.assert_close(ours.to_dense(), stock.to_dense(), atol=1e-9, rtol=1e-9)


def accelerated(host, encoder) -> torch.nn.Module:
    model = host.model(encoder).eval()
    if not {"encode", "_inference"} & {patch.name for patch in find_patches(type(model))}:
        pytest.skip("Sentence Transformers encodes in one function before release 6.2, which is left as it is")
    return model


def find_patches(kind: type) -> list:
    return [each.patch for each in find_replacements() if each.patch is not None and each.patch.owner is kind]


@pytest.mark.parametrize(
    "host, options", [each for name, calls in CALLS.items() for options in calls for each in each_host([name], options)]
)
def test_embeddings_are_those_of_stock(encoder, host, options, mode):
    model = accelerated(host, encoder)
    if host is host_of("PyLate") and not options.keys() <= signature(type(model).encode).parameters.keys():
        pytest.skip("this release has no output_value")

    if factor := options.get("token_pooling"):
        from sentence_transformers.multi_vector_encoder.modules import HierarchicalTokenPooling

        options = {**options, "token_pooling": HierarchicalTokenPooling(factor, num_protected_tokens=0)}

    def encode(texts):
        return model.encode(texts, batch_size=2, show_progress_bar=False, **options)

    forms = [TEXTS, TEXTS[:3], TEXTS[0], *([[TEXTS[:2], TEXTS[2:5]]] if options == {"is_query": True} else [])]
    expected = [encode(texts) for texts in forms]
    host.enable()
    for texts, stock in zip(forms, expected, strict=True):
        assert_same(encode(texts), stock)


@pytest.mark.parametrize("host", each_host(CALLS))
def test_a_batch_that_fails_ends_the_call(encoder, host):
    model, calls = accelerated(host, encoder), []
    before = threading.active_count()
    host.enable()

    def fail(*_):
        calls.append(None)
        if len(calls) > 3:
            raise failure

    host.transformer(model).register_forward_pre_hook(fail)
    for failure in (KeyboardInterrupt(), torch.OutOfMemoryError("no memory"), ValueError("no")):
        calls.clear()
        with pytest.raises(type(failure)) as raised:
            model.encode(TEXTS * 4, batch_size=3)
        if isinstance(failure, torch.OutOfMemoryError):
            assert "smaller batch_size than 3" in str(raised.value)
    with pytest.raises((TypeError, AttributeError, ValueError)):
        model.encode([*TEXTS, None], batch_size=3)
    assert threading.active_count() <= before + 1  # tqdm keeps a monitor
    assert len(model.encode(TEXTS[:0])) == 0


@pytest.mark.parametrize("host", each_host(CALLS))
def test_threads_encode_with_one_model(encoder, host):
    model = accelerated(host, encoder)
    host.enable()
    with ThreadPoolExecutor(4) as threads:
        expected, *others = threads.map(lambda _: model.encode(TEXTS * 8, show_progress_bar=False), range(4))
    for made in others:
        assert_same(made, expected)


def test_a_tokenizer_and_a_pooling_of_the_users_own_are_used(encoder, caplog):
    pytest.importorskip("pylate")
    model = load_model(encoder("modernbert"))

    class Shouting(type(model.tokenizer)):
        def __call__(self, texts, *args, **options):
            return super().__call__([text.replace("e", "a") for text in texts], *args, **options)

    model.tokenizer.__class__ = Shouting
    expected = model.encode(TEXTS, is_query=False, show_progress_bar=False)
    pylate_fastmaxsim.enable()
    caplog.set_level("INFO", "pylate_fastmaxsim")
    made = model.encode(TEXTS, is_query=False, show_progress_bar=False)
    for own, stock in zip(made, expected, strict=True):
        torch.testing.assert_close(own, stock, atol=1e-5, rtol=1e-5)
    assert "its tokenizer gives other features" in caplog.text
    model.pool_embeddings_hierarchical = lambda documents_embeddings, **_: [each[:1] for each in documents_embeddings]
    pooled = model.encode(TEXTS, is_query=False, show_progress_bar=False, pool_factor=2)
    assert {len(each) for each in pooled} == {1}
