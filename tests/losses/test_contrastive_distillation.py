"""ContrastiveDistillation: both losses of the host together, in one pass, with and without the flag."""

import pytest
import torch
from torch.nn import functional as F

import pylate_fastmaxsim
from pylate_fastmaxsim.losses import ContrastiveDistillation, Matryoshka, PooledContrastive
from tests.support.compared import assert_equal, run
from tests.support.loss_hosts import COUNT, HOST, LABELS, OPTIONS, WAYS, batch_of, one_column

SIZES = [{}, {"mini_batch_size": 2}, {"mini_batch_tokens": 70}]


@pytest.fixture
def model(encoder):
    # ModernBERT rotates in float32, so that gradients of a sum are no sums of gradients.
    return HOST.load(encoder("bert"))


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_it_is_both_losses_of_the_host(model, mode, size):
    batch = batch_of(model)
    stock = run(HOST.both(model), batch, LABELS)
    loss = ContrastiveDistillation(model, **OPTIONS, **size)
    plain = run(loss, batch, LABELS)
    with torch.no_grad():
        torch.testing.assert_close(loss(batch, LABELS), plain[0])
    with pylate_fastmaxsim.enabled():
        assert_equal(run(loss, batch, LABELS), plain)
        assert HOST.modes(model) == {mode}
        with torch.no_grad():
            torch.testing.assert_close(loss(batch, LABELS), plain[0])
    with pylate_fastmaxsim.enabled(**HOST.exactly):
        for _ in range(2):
            assert_equal(run(loss, batch, LABELS), stock, HOST.tolerance)


def test_chunks_of_queries_leave_the_gradient_of_all(model, monkeypatch):
    whole = run(ContrastiveDistillation(model, **OPTIONS), batch_of(model), LABELS)
    monkeypatch.setattr("pylate_fastmaxsim.losses.contrastive_distillation.queries_at_once", lambda *_: 4)
    assert_equal(run(ContrastiveDistillation(model, **OPTIONS, mini_batch_size=6), batch_of(model), LABELS), whole)


def test_dropout_and_autocast_are_those_of_the_first_pass(encoder, packed):
    model = HOST.load(encoder("bert", hidden_dropout_prob=0.3), double=False)
    loss = ContrastiveDistillation(model, mini_batch_size=2)
    pylate_fastmaxsim.enable()
    run(loss, batch_of(model), LABELS)
    made = []
    model.register_forward_hook(lambda _module, _args, output: made.append(output["token_embeddings"].detach()))
    with torch.autocast("cpu", torch.bfloat16):
        value = loss(batch_of(model), LABELS)
    value.backward()
    half = len(made) // 2
    assert half > 3
    assert all(torch.equal(*pair) for pair in zip(made[:half], made[half:], strict=True))


def test_documents_in_one_column(model):
    loss = ContrastiveDistillation(model, mini_batch_tokens=100)
    assert_equal(run(loss, one_column(model), LABELS), run(loss, batch_of(model), LABELS), HOST.tolerance)


def test_the_pooling_of_the_flag(model):
    pooling = pylate_fastmaxsim.TopK(2)
    loss, batch = ContrastiveDistillation(model), batch_of(model)
    maximum = run(loss, batch, LABELS)
    with pylate_fastmaxsim.enabled(pooling=pooling):
        pooled = run(loss, batch, LABELS)
        scores = pylate_fastmaxsim.pooled_scores(*pylate_fastmaxsim.encode(model, batch), pooling=pooling)
    own = torch.arange(COUNT * WAYS).view(COUNT, WAYS)
    student = scores.gather(1, own).log_softmax(1)
    expected = F.cross_entropy(scores, own[:, 0]) + F.kl_div(student, LABELS.softmax(1), reduction="batchmean")
    torch.testing.assert_close(pooled[0], expected.detach(), check_dtype=False)
    assert pooled[0] != maximum[0]


# What a loss is built with, how many columns and labels it is given, and what it says.
REFUSED = [
    ({}, 4, LABELS[:, :2], r"\[B, N\] = \[6, 3\], got \(6, 2\)"),
    ({}, 2, LABELS[:, :1], r"at least two, \[B, N\] = \[6, 1\]"),
    ({"teacher_temperature": 0}, 4, LABELS, "temperature must be a number above 0, got 0"),
    ({"mini_batch_size": 1, "mini_batch_tokens": 1}, 4, LABELS, "not both"),
    ({"mini_batch_size": 0}, 4, LABELS, "mini_batch_size must be at least 1, got 0"),
]


@pytest.mark.parametrize("options, columns, labels, sentence", REFUSED)
def test_what_cannot_be_is_said_in_a_sentence(model, options, columns, labels, sentence):
    with pytest.raises(ValueError, match=sentence):
        ContrastiveDistillation(model, **options)(batch_of(model)[:columns], labels)


def test_settings_for_a_model_card(model):
    both = ContrastiveDistillation(model, mini_batch_tokens=60)
    weights = dict.fromkeys(("contrastive_weight", "distillation_weight", "temperature", "teacher_temperature"), 1.0)
    sizes = {"mini_batch_size": None, "mini_batch_tokens": 60, "gather_across_devices": False}
    assert both.get_config_dict() == weights | sizes
    pooled = {"factors": (1.0, 2.0), "weights": (1.0, 1.0), "temperature": 1.0} | sizes
    assert PooledContrastive(model, (1, 2), mini_batch_tokens=60).get_config_dict() == pooled
    config = Matryoshka(model, both, (64, 32)).get_config_dict()
    assert config["loss"] == "ContrastiveDistillation" and config["dims"] == (64, 32)


@pytest.mark.e2e
@pytest.mark.parametrize("size", [{}, {"mini_batch_tokens": 200}], ids=str)
def test_loss_curves_of_the_trainer(encoder, packed, tmp_path, size):
    def curve() -> list[float]:
        torch.manual_seed(0)
        model = HOST.load(encoder("bert"), double=False)
        loss = ContrastiveDistillation(model, temperature=0.5, teacher_temperature=0.5, **size)
        loss = Matryoshka(model, loss, (16, 8), document_tokens=(None, 4), pooled=bool(size))
        return HOST.train(model, loss, tmp_path)

    stock = curve()
    pylate_fastmaxsim.enable()
    assert curve() == pytest.approx(stock, rel=2e-3)
    assert len(stock) > 3 and stock[-1] != stock[0]
