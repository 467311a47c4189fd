"""Decoders that encode texts keep no keys and values for texts that go on."""

import pytest
from pylate import losses
from transformers import DynamicCache

import pylate_fastmaxsim
from pylate_fastmaxsim.integrations.compilation import layers as compilation_layers
from tests.support.compared import assert_equal, batch_of, run
from tests.support.models import load_model, sentences


@pytest.fixture
def kept(monkeypatch):
    seen, update = [], DynamicCache.update
    monkeypatch.setattr(DynamicCache, "update", lambda self, *args: seen.append(True) or update(self, *args))
    return seen


def test_nothing_is_kept_unless_somebody_asks_and_nothing_else_changes(encoder, kept):
    model = load_model(encoder("qwen3")).double()
    loss_function, batch = losses.Contrastive(model), batch_of(model)
    expected, asked = run(loss_function, batch), {"use_cache": True}
    assert kept
    kept.clear()
    with pylate_fastmaxsim.enabled(stock_masking=True):
        assert_equal(run(loss_function, batch), expected)
        model.encode(sentences(2), is_query=False, show_progress_bar=False)
        assert not kept
        for features, kwargs in (({}, asked), (asked, {})):
            kept.clear()
            model[0]({**model.tokenize(sentences(2), is_query=False), **features}, **kwargs)
            assert kept
    assert model[0].auto_model.config.use_cache
    kept.clear()
    run(loss_function, batch)
    assert kept


def test_layers_that_share_keys_find_them(encoder, kept, caplog):
    """Without what is kept, those of Gemma 3n would make keys and values of their own, by weights that nobody trained."""
    layers = {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": ("full_attention",) * 4}
    model = load_model(encoder("gemma3n", **layers))
    loss_function, batch = losses.Contrastive(model), batch_of(model)
    expected = loss_function([dict(column) for column in batch]).item()
    kept.clear()
    with pylate_fastmaxsim.enabled(stock_masking=True):
        assert loss_function(batch).item() == pytest.approx(expected, rel=1e-4)
        assert kept
    with pylate_fastmaxsim.enabled(compile=True):
        compilation_layers.compile_layers(model)
    assert "compiles each layer of Gemma3nTextModel separately" in caplog.text
