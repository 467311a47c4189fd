"""What the trial on the first batch finds out about models in training, and that it leaves them as they were."""

from __future__ import annotations

import gc
from functools import partial

import pytest
import torch
from models import Behind, features, load_model
from pylate import losses
from pylate.models import ColBERT
from test_losses import assert_equal, run
from test_packing import assert_encodes_as_stock, batch_of, mode_of
from torch import nn
from torch.nn import functional as F
from transformers.integrations.neftune import neftune_post_forward_hook

import pylate_fastmaxsim
from pylate_fastmaxsim.integrations import decisions, packing, trials


class _Normalised(Behind):
    def __init__(self, dense):
        super().__init__(dense)
        self.norm = nn.BatchNorm1d(16)

    def change(self, features):
        embeddings = features["token_embeddings"]
        features["token_embeddings"] = self.norm(embeddings.flatten(0, 1)).view_as(embeddings)
        return features


class _Frozen(_Normalised):
    """Statistics that stay as they are in training."""

    def train(self, training=True):
        super().train(training)
        self.norm.eval()
        return self


class _OwnNorm(Behind):
    def __init__(self, dense):
        super().__init__(dense)
        self.register_buffer("mean", torch.zeros(16))
        self.register_buffer("variance", torch.ones(16))

    def change(self, features):
        embeddings = features["token_embeddings"]
        normed = F.batch_norm(embeddings.flatten(0, 1), self.mean, self.variance, training=self.training)
        features["token_embeddings"] = normed.view_as(embeddings)
        return features


class _Noisy(Behind):
    """Random numbers that torch does not know of."""

    def __init__(self, dense):
        super().__init__(dense)
        self.generator = torch.Generator()

    def change(self, features):
        embeddings = features["token_embeddings"]
        if self.training:
            features["token_embeddings"] = embeddings + torch.rand(embeddings.shape, generator=self.generator)
        return features


class _Counting(Behind):
    """Keeps how many tokens it has seen, and makes nothing of it."""

    def __init__(self, dense):
        super().__init__(dense)
        self.register_buffer("seen", torch.zeros(()))

    def change(self, features):
        if self.training:
            self.seen += features["token_embeddings"].shape[:2].numel()
        return features


class _Centred(Behind):
    """In training, every token without the mean of all, and without what dropout takes."""

    def __init__(self, dense, dropout):
        super().__init__(dense)
        self.dropout = nn.Dropout(dropout)

    def change(self, features):
        embeddings = features["token_embeddings"]
        if self.training:
            features["token_embeddings"] = self.dropout(embeddings - embeddings.mean(dim=(0, 1)))
        return features


class _CentredAndNoisy(Behind):
    """Dropout as a function, and the mean of all tokens."""

    def change(self, features):
        embeddings = features["token_embeddings"]
        if self.training:
            features["token_embeddings"] = F.dropout(embeddings, 0.1) - embeddings.mean(dim=(0, 1))
        return features


class _Gated(Behind):
    """The mean of all tokens, through a gate that begins at zero."""

    def __init__(self, dense):
        super().__init__(dense)
        self.gate = nn.Parameter(torch.zeros(()))

    def change(self, features):
        embeddings = features["token_embeddings"]
        features["token_embeddings"] = embeddings + self.gate * embeddings.mean(dim=(0, 1))
        return features


class _Moving(Behind):
    """A mean of all tokens so far, in a parameter without a gradient as those of codebooks are."""

    def __init__(self, dense):
        super().__init__(dense)
        self.mean = nn.Parameter(torch.zeros(16), requires_grad=False)

    def change(self, features):
        embeddings = features["token_embeddings"]
        if self.training:
            self.mean.data.lerp_(embeddings.detach().mean(dim=(0, 1)), 0.1)
        features["token_embeddings"] = embeddings - self.mean.detach().clone()
        return features


class _Listing(Behind):
    """Collects a loss of each call for the script to add."""

    def __init__(self, dense):
        super().__init__(dense)
        self.losses = []

    def change(self, features):
        if self.training:
            self.losses.append(features["token_embeddings"].square().mean())
        return features


class _Scaling(Behind):
    """A parameter that is made of the first call."""

    def __init__(self, dense):
        super().__init__(dense)
        self.register_parameter("scale", None)

    def change(self, features):
        embeddings = features["token_embeddings"]
        if self.scale is None:
            self.scale = nn.Parameter(1 / embeddings.detach().std(dim=(0, 1)))
        features["token_embeddings"] = embeddings * self.scale
        return features


class _Thawing(Behind):
    """Trains its head from the fourth call on."""

    def __init__(self, dense):
        super().__init__(dense.requires_grad_(False))
        self.calls = 0

    def change(self, features):
        self.calls += 1
        if self.calls > 3:
            self.dense.requires_grad_(True)
        return features


class _CentredWhole(ColBERT):
    def forward(self, features, **kwargs):
        features = super().forward(features, **kwargs)
        if self.training:
            embeddings = features["token_embeddings"]
            features["token_embeddings"] = embeddings - embeddings.mean(dim=(0, 1))
        return features


def _add_norm(model):
    model[1] = _Normalised(model[1]).to(model.dtype)


def _add_centre(model, dropout=0.0):
    model[1] = _Centred(model[1], dropout)


def _add(kind, model):
    model[1] = kind(model[1]).to(model.dtype)


def _add_centring_hook(model):
    def centre(dense, _args, features):
        embeddings = features["token_embeddings"]
        return {**features, "token_embeddings": embeddings - dense.training * embeddings.mean(dim=(0, 1))}

    model[1].register_forward_hook(centre)


def _be_centred(model):
    model.__class__ = _CentredWhole


def _add_noise(model):
    embeddings = model[0].auto_model.get_input_embeddings()
    embeddings.neftune_noise_alpha = 5.0
    embeddings.register_forward_hook(neftune_post_forward_hook)


def _add_own_norm(model):
    model[1] = _OwnNorm(model[1]).to(model.dtype)


def _add_counter(model):
    model[1] = _Counting(model[1])


def state_of(model):
    """What a call may change beside gradients: parameters, buffers, and what modules keep in plain attributes."""
    plain = {
        (name, key): list(value) if isinstance(value, list) else value
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, (bool, int, float, str, type(None), list))
    }
    return {name: value.clone() for name, value in model.state_dict().items()}, plain


def assert_deciding_changes_nothing(model, columns):
    buffers, plain = state_of(model)
    mode = packing._mode(model, columns, None)
    torch.testing.assert_close(state_of(model)[0], buffers, rtol=0, atol=0)
    assert state_of(model)[1] == plain
    return mode


@pytest.mark.parametrize(
    "change, said",
    [
        (_add_norm, "BatchNorm1d normalises by all tokens of a call"),
        (_add_noise, "NEFTune scales its noise by the width of a call"),
        (_add_counter, "ModernBertModel with _Counting remembers something of each call"),
        (_add_own_norm, "ModernBertModel with _OwnNorm remembers something of each call"),
        (
            partial(_add_centre, dropout=0.5),
            "ModernBertModel with _Centred gives other token embeddings in training without padding",
        ),
        (
            partial(_add, _CentredAndNoisy),
            "in training ModernBertModel with _CentredAndNoisy lets the texts of a call see each other",
        ),
        (partial(_add, _Moving), "ModernBertModel with _Moving remembers something of each call"),
        (partial(_add, _Listing), "ModernBertModel with _Listing remembers something of each call"),
        (_add_centring_hook, "ModernBertModel gives other token embeddings in training without padding"),
        (_be_centred, "ModernBertModel with _CentredWhole gives other token embeddings in training without padding"),
    ],
)
def test_what_depends_in_training_on_all_tokens_of_a_call(model, mode, caplog, change, said):
    change(model)
    pylate_fastmaxsim.enable()
    batch = batch_of(model)
    assert assert_deciding_changes_nothing(model, batch[1:]) == "padded"
    assert f"with padding, as stock PyLate does: {said}" in caplog.text
    model.eval()
    assert assert_deciding_changes_nothing(model, batch[1:]) == mode
    assert_encodes_as_stock(model, batch)


@pytest.mark.parametrize("add", [partial(_add, _Gated), _add_norm], ids=["gate", "norm"])
def test_a_head_in_training_behind_an_encoder_that_is_not(model, mode, add):
    add(model)
    model.eval()
    model[1].train()
    pylate_fastmaxsim.enable()
    assert assert_deciding_changes_nothing(model, batch_of(model)[1:]) == "padded"


@pytest.mark.parametrize("training", [False, True])
def test_what_a_gate_lets_through_only_after_some_steps(model, mode, caplog, training):
    _add(_Gated, model)
    model.train(training)
    pylate_fastmaxsim.enable()
    with torch.inference_mode(not training):
        assert assert_deciding_changes_nothing(model, batch_of(model)[1:]) == "padded"
    assert "ModernBertModel with _Gated gives other token embeddings" in caplog.text


def test_what_is_remembered_of_each_call_in_evaluation(model, mode, caplog):
    class _CountingAlways(Behind):
        calls = 0

        def change(self, features):
            self.calls += 1
            return features

    _add(_CountingAlways, model)
    model.eval()
    pylate_fastmaxsim.enable()
    assert assert_deciding_changes_nothing(model, batch_of(model)[1:]) == "padded"
    assert "ModernBertModel with _CountingAlways remembers something of each call" in caplog.text


def test_a_module_that_answers_in_float32_behind_an_encoder_in_bfloat16(model, mode, caplog):
    class _Wide(Behind):
        def change(self, features):
            features["token_embeddings"] = features["token_embeddings"].float()
            return features

    model.bfloat16()
    _add(_Wide, model)
    pylate_fastmaxsim.enable()
    assert assert_deciding_changes_nothing(model, batch_of(model)[1:]) == mode
    assert "padding" not in caplog.text or mode == "grouped"


def test_another_encoder_is_decided_about_anew_and_what_is_gone_is_forgotten(model, mode, encoder):
    pylate_fastmaxsim.enable()
    batch = batch_of(model)
    assert packing._mode(model, batch[1:], None) == mode
    model[0].auto_model = load_model(encoder("fnet")).to(model.dtype)[0].auto_model
    assert packing._mode(model, batch[1:], None) == "padded"
    for _ in range(3):
        model[1] = _Counting(model[1].dense if isinstance(model[1], Behind) else model[1])
        packing._mode(model, batch[1:], None)
        gc.collect()
    assert len(packing._modes[model]) <= 3


def test_masks_of_bools_stay_as_they_are_while_random_modules_are_tried(model, mode, monkeypatch):
    _add(_Noisy, model)
    tried, other_texts = [], trials._other_texts
    monkeypatch.setattr(trials, "_other_texts", lambda documents: tried.append(documents) or other_texts(documents))
    columns = [{**column, "attention_mask": column["attention_mask"].bool()} for column in batch_of(model)[1:]]
    pylate_fastmaxsim.enable()
    packing._mode(model, columns, None)
    assert tried and all(documents.column["attention_mask"].any(dim=1).all() for documents in tried)


@pytest.mark.parametrize("kind", [_Frozen, _Noisy])
def test_what_depends_on_nothing_else_of_a_call_is_no_reason_to_pad(model, mode, caplog, kind):
    model[1] = kind(model[1]).to(model.dtype)
    model.train()
    pylate_fastmaxsim.enable()
    batch = batch_of(model)
    assert assert_deciding_changes_nothing(model, batch[1:]) == mode
    assert "in training" not in caplog.text
    if kind is _Frozen:
        assert_encodes_as_stock(model, batch)


def test_a_module_at_the_address_of_one_that_is_gone_is_another(model):
    dense, addresses, states = model[1], [], []
    while len(set(addresses)) == len(addresses):
        model[1] = Behind(dense)
        addresses.append(id(model[1]))
        states.append(decisions._state(model))
        assert hash(states[-1]) and states.count(states[-1]) == 1


@pytest.mark.parametrize("kind", [_Scaling, _Thawing])
def test_parameters_that_a_call_makes_or_trains_are_as_before_the_trial(encoder, mode, kind):
    def step():
        model = load_model(encoder("bert")).double()
        _add(kind, model)
        return run(losses.Contrastive(model), batch_of(model, collate=features))

    stock = step()
    pylate_fastmaxsim.enable(stock_masking=True)
    ours = step()
    assert ours[1].keys() == stock[1].keys()
    assert_equal(ours, stock)


@pytest.mark.parametrize("first", [True, False], ids=["before the first batch", "after it"])
@pytest.mark.parametrize("change", [_add_norm, _add_noise, _add_counter, _add_centre])
@pytest.mark.parametrize("loss_class", [losses.Contrastive, partial(losses.CachedContrastive, mini_batch_size=2)])
def test_the_losses_of_what_depends_on_all_tokens_of_a_call(model, mode, change, loss_class, first):
    loss_function = loss_class(model)
    if not first:
        with pylate_fastmaxsim.enabled(stock_masking=True):
            run(loss_function, batch_of(model, collate=features))
            assert mode_of(model) == {mode}
    change(model)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}

    def trained():
        torch.manual_seed(0)
        for name, buffer in buffers.items():
            model.get_buffer(name).copy_(buffer)
        result = run(loss_function, batch_of(model, collate=features))
        return result, {name: buffer.clone() for name, buffer in model.named_buffers()}

    stock, stock_buffers = trained()
    pylate_fastmaxsim.enable(stock_masking=True)
    ours, our_buffers = trained()
    assert_equal(ours, stock)
    torch.testing.assert_close(our_buffers, stock_buffers)


def test_an_encoder_that_quantises_by_all_tokens_of_a_call(encoder, mode, caplog):
    model = load_model(encoder("ibert", quant_mode=True)).double()
    pylate_fastmaxsim.enable()
    assert assert_deciding_changes_nothing(model, batch_of(model)[1:]) == "padded"
    assert "with padding, as stock PyLate does: IBertModel remembers something of each call" in caplog.text
    assert_encodes_as_stock(model.eval(), batch_of(model))


@pytest.mark.parametrize("family", ["longrope", "dynamic rope"])
def test_rotary_positions_are_as_before_the_trial(encoder, mode, family):
    model = load_model(encoder(family)).double()
    pylate_fastmaxsim.enable()
    assert assert_deciding_changes_nothing(model, batch_of(model)[1:]) == "padded"


@pytest.mark.parametrize("inside", [False, True], ids=["backward outside", "backward inside"])
@pytest.mark.parametrize("loss_class", [losses.Contrastive, losses.CachedContrastive])
def test_all_weights_have_gradients_under_autocast(encoder, mode, loss_class, inside):
    """Up to PyTorch 2.10 autocast keeps weights that were cast without gradients, as a trial does, for who needs some."""
    model = load_model(encoder("modernbert"))
    options = {"mini_batch_size": 2} if loss_class is losses.CachedContrastive else {}
    loss_function, batch = loss_class(model, **options), batch_of(model)
    pylate_fastmaxsim.enable()
    for _ in range(2):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_function([dict(column) for column in batch])
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        assert [name for name, weight in model.named_parameters() if weight.grad is None] == []
