"""Sentence Transformers' own late interaction: what of a MultiVectorEncoder is encoded without padding, and when."""

import logging

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from sentence_transformers import MultiVectorEncoder
from sentence_transformers.base.modules import Transformer
from torch import nn

import pylate_fastmaxsim
from pylate_fastmaxsim.integrations import doctor, hosts
from pylate_fastmaxsim.integrations.encoding import modes as encoding_modes
from tests.support.hosts import encoder_calls
from tests.support.models import looking
from tests.support.multi_vector import HOST, POSITIVES, QUERIES, batch_of, load, modes, step_of


@pytest.fixture
def model(encoder) -> MultiVectorEncoder:
    return load(encoder("bert"))


@pytest.mark.parametrize(("strategy", "attend"), [("fixed", True), ("min", False)])
def test_query_expansion(encoder, mode, monkeypatch, caplog, strategy, attend):
    model = load(encoder("bert"))
    model[0].query_expansion = {"strategy": strategy, "attend": attend, "length": 10}
    HOST.assert_as_stock(model, step_of(model), monkeypatch)
    # That they are padded is the rule.
    assert "with padding" not in caplog.text


def test_columns_that_are_not_merged(model, packed, monkeypatch):
    step = step_of(model)
    made, stock = encoder_calls(model), step.run()
    pylate_fastmaxsim.enable()
    # Behind enable(), which leaves a loss to stock if a function that it calls was replaced before.
    merge = "sentence_transformers.base.losses.merged_forward.merge_feature_batches"
    monkeypatch.setattr(merge, lambda features_list: None)
    step.run()
    made.clear()
    step.assert_equal(step.run(), stock)
    assert len(made) == 1


def test_only_training_and_encode_leave_padding_out(model, mode):
    pylate_fastmaxsim.enable()
    with torch.no_grad():
        model.eval()(batch_of(model)[1], task="document")
    assert not modes(model)
    model.encode_document(POSITIVES[:2], show_progress_bar=False)
    assert modes(model) == ({mode} if hasattr(type(model), "_inference") else set())
    model.train()(batch_of(model)[1], task="document")
    assert modes(model) == {mode}


def test_queries_are_not_decided_about_again_after_longer_documents(model, packed):
    """An evaluator encodes both in turn, and a decision takes a dozen calls of the encoder."""
    pylate_fastmaxsim.enable()
    decided = []
    for _ in range(2):
        model.encode_query(QUERIES, show_progress_bar=False)
        model.encode_document(POSITIVES, show_progress_bar=False)
        decided.append(len(encoding_modes.chosen.get(model[0], ())))
    assert decided[0] == decided[1]


def test_the_output_is_that_of_stock_but_for_padding(model, mode):
    features = batch_of(model)[1]
    stock = model[0](dict(features))["token_embeddings"]
    pylate_fastmaxsim.enable()
    seen = []
    model[1].register_forward_pre_hook(looking(lambda _, args: seen.append(dict(args[0]))))
    for _ in range(2):  # the first call has trials
        seen.clear()
        model(dict(features), task="document")
    assert modes(model) == {mode}
    assert seen[0].keys() == {*features, "token_embeddings"}
    attended = features["attention_mask"].bool()
    torch.testing.assert_close(seen[0]["token_embeddings"][attended], stock[attended])
    assert seen[0]["token_embeddings"].shape == stock.shape
    # Where a length of 0 would be divided by, losses would be NaN.
    assert seen[0]["token_embeddings"][~attended].any(dim=-1).all()


def test_a_model_as_accelerate_prepares_it(model, mode):
    AcceleratorState._reset_state(reset_partial_state=True)  # of a trainer in another test
    prepared = Accelerator(cpu=True, mixed_precision="bf16").prepare_model(model.float())
    features = batch_of(model)[1]
    stock = prepared(dict(features), task="document")
    pylate_fastmaxsim.enable()
    ours = prepared(dict(features), task="document")["token_embeddings"]
    assert modes(model) == {mode}
    # The check on the first batch runs inside of accelerate's autocast, which must end all the same.
    assert not torch.is_autocast_enabled("cpu")
    attended = stock["attention_mask"]
    torch.testing.assert_close(ours[attended], stock["token_embeddings"][attended], rtol=0, atol=0.05)


def test_off_again_everything_is_as_it_came(model, caplog):
    names = {"__call__", "forward"}
    stock = Transformer.forward, names & vars(MultiVectorEncoder).keys()
    with caplog.at_level(logging.INFO), pylate_fastmaxsim.enabled():
        assert Transformer.forward is not stock[0]
        step_of(model).run()
    assert (Transformer.forward, names & vars(MultiVectorEncoder).keys()) == stock
    assert MultiVectorEncoder.__call__ is nn.Module.__call__
    assert "Sentence Transformers" in caplog.text and " accelerated: fused MaxSim" in caplog.text
    assert {
        "sentence_transformers.util.similarity.maxsim",
        "sentence_transformers.base.modules.transformer.Transformer.forward",
    } <= set(doctor.diagnose()["enable() replaces"])


def test_an_option_that_only_pylate_has(caplog, monkeypatch):
    # Another host may be there too.
    monkeypatch.setattr(hosts, "HOSTS", tuple(host for host in hosts.HOSTS if host.name == "Sentence Transformers"))
    pylate_fastmaxsim.enable(stock_masking=True)
    assert "stock_masking=True has no effect: it is an option for PyLate." in caplog.text
