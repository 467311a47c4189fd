"""``encode`` for losses by hand: the values of the host, the same with the flag as without, and their gradients."""

import pytest
from torch import nn

import pylate_fastmaxsim
from pylate_fastmaxsim import encode
from tests.support.compared import assert_equal, run
from tests.support.loss_hosts import HOST, LABELS, ByHand, Weighted, batch_of


@pytest.fixture
def model(encoder):
    return HOST.load(encoder("modernbert"))


def test_a_loss_by_hand_is_those_of_the_host(encoder, mode):
    model = HOST.load(encoder("bert"))
    by_hand = run(ByHand(model), batch_of(model), LABELS)
    losses = {name: HOST.loss(name, model) for name in ("contrastive", "distillation")}
    terms = [(1.0, lambda _, labels, name=name: losses[name](HOST.batch_for(name, model), labels)) for name in losses]
    pylate_fastmaxsim.enable()
    assert_equal(run(Weighted(model, *terms), batch_of(model), LABELS), by_hand, HOST.tolerance)
    assert_equal(run(ByHand(model), batch_of(model), LABELS), by_hand)
    assert HOST.modes(model) == {mode}


def test_what_cannot_be_encoded_is_said_in_a_sentence(model):
    batch = batch_of(model)[:2]
    with pytest.raises(ValueError, match="got columns of 6, 5"):
        encode(model, [batch[0], {key: value[:5] for key, value in batch[1].items()}])
    with pytest.raises(ValueError, match="got columns of 6"):
        encode(model, batch[:1])
    with pytest.raises(TypeError, match="a ColBERT of PyLate or a MultiVectorEncoder.*got Linear"):
        encode(nn.Linear(1, 1), batch)
