"""How a model is encoded is decided anew when the model changes, and deciding leaves it as it was."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from accelerate.utils.operations import convert_outputs_to_fp32
from pylate import losses
from torch import nn
from transformers.models.bert.modeling_bert import BertOutput

import pylate_fastmaxsim
from pylate_fastmaxsim.integrations.encoding import attention as encoding_attention
from pylate_fastmaxsim.integrations.encoding import modes
from tests.support.encoded import Normalised, assert_encodes_as_stock, batch_of
from tests.support.models import TEXT, attend_to_own_document, features, load_model, sentences

CACHED = partial(losses.CachedContrastive, mini_batch_size=2)


def in_autocast(_model, _patch):
    return torch.autocast("cpu", torch.bfloat16)


def as_accelerate(model, _patch):
    model.forward = convert_outputs_to_fp32(torch.autocast("cpu", torch.bfloat16)(model.forward))


def evaluated(model, _patch):
    model.eval()


def of_width(width: int) -> Callable:
    return lambda model, _patch: setattr(model, "document_length", width)


def eager(model, _patch):
    model[0].auto_model.set_attn_implementation("eager")


def own_code(_model, patch):
    forward = BertOutput.forward
    patch.setattr(BertOutput, "forward", lambda self, *args: forward(self, *args))


# What packed attention refuses, the changes of a model, and how it is encoded after each.
ANEW = {
    "precision": (
        lambda query, _ends, _dropout: query.dtype != torch.bfloat16,
        [(lambda *_: None, "grouped"), (in_autocast, "packed"), (as_accelerate, "packed")],
    ),
    "dropout": (lambda _query, _ends, dropout: dropout > 0, [(lambda *_: None, "grouped"), (evaluated, "packed")]),
    "width": (
        lambda _query, ends, _dropout: ends.diff().max() > 16,
        [(of_width(16), "packed"), (of_width(64), "grouped"), (of_width(16), "packed")],
    ),
    "attention": (lambda *_: False, [(lambda *_: None, "packed"), (eager, "grouped")]),
    "code": (lambda *_: False, [(lambda *_: None, "packed"), (own_code, "padded")]),
}


@pytest.mark.parametrize("refuses, steps", ANEW.values(), ids=ANEW.keys())
def test_it_is_decided_anew(encoder, monkeypatch, refuses, steps):
    def attend(query, key, value, cu_seqlens, *args, dropout, **options):
        if refuses(query, cu_seqlens, dropout):
            raise encoding_attention.PackingUnsupported("not this")
        return attend_to_own_document(query, key, value, cu_seqlens, *args, dropout=dropout, **options)

    monkeypatch.setattr(encoding_attention, "variable_length_attention", attend)
    model = load_model(encoder("bert", attention_probs_dropout_prob=0.2))
    pylate_fastmaxsim.enable()
    for change, expected in steps:
        with change(model, monkeypatch) or nullcontext():
            batch = features(model, ["late interaction"], [TEXT])
            assert modes.mode_for(model, batch[1:], None) == expected


def state_of(model):
    """What a call may change beside gradients: parameters, buffers, and what modules keep in plain attributes."""
    plain = {
        (name, key): list(value) if isinstance(value, list) else value
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, (bool, int, float, str, type(None), list))
    }
    return {name: value.clone() for name, value in model.state_dict().items()}, plain


@pytest.mark.parametrize(
    "family, config, said",
    [("bert", {}, None), ("ibert", {"quant_mode": True}, "IBertModel updates its buffers in each call")],
)
@pytest.mark.parametrize("behind", [nn.Identity, nn.BatchNorm1d])
def test_deciding_changes_nothing(encoder, mode, caplog, family, config, said, behind):
    model = load_model(encoder(family, **config)).double()
    if behind is nn.BatchNorm1d:
        model[1], said = Normalised(model[1]), "BatchNorm1d normalises by all tokens of a call"
    pylate_fastmaxsim.enable(padding_free="always")
    batch = batch_of(model)

    def decide(expected: str | None) -> None:
        (buffers, plain), random_state = state_of(model), torch.get_rng_state()
        found = modes.mode_for(model, batch[1:], None)
        assert expected in (found, None)
        assert torch.equal(random_state, torch.get_rng_state())
        assert all(weight.grad is None for weight in model.parameters())
        torch.testing.assert_close(state_of(model)[0], buffers, rtol=0, atol=0)
        assert state_of(model)[1] == plain

    decide("padded" if said else mode)
    assert said is None or f"with padding, as stock PyLate does: {said}" in caplog.text
    model.eval()
    decide(mode if family == "bert" else None)
    assert_encodes_as_stock(model, batch)
    if behind is nn.BatchNorm1d:  # behind an encoder that is not in training
        model[1].train()
        decide("padded")


def test_a_backward_that_is_still_to_come(encoder, mode):
    model = load_model(encoder("bert"), document_length=40).double()
    narrow = features(model, ["sea", "sand"], ["a", "the sea"])
    narrow[1] = {key: value[:, :8] for key, value in narrow[1].items()}
    wide = features(model, sentences(2, longest=8), sentences(2))
    loss_function = losses.Contrastive(model)
    pylate_fastmaxsim.enable()
    (loss_function(narrow, None) + loss_function(wide, None)).backward()
    assert model[0].auto_model.embeddings.position_embeddings.weight.grad.abs().sum() > 0
