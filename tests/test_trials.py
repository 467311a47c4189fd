"""What the trial on the first batch finds out about an encoder."""

from __future__ import annotations

import logging
import re
from functools import partial

import pytest
import torch
from models import TEXT, Behind, attend_to_own_document, collated, features, load_model, sentences
from pylate import losses
from pylate.models import ColBERT
from test_losses import assert_equal, run
from test_packing import assert_encodes_as_stock, batch_of, calls_of, encode, mode_of
from torch import nn
from torch.nn import functional as F
from transformers.integrations.neftune import neftune_post_forward_hook

import pylate_fastmaxsim
from pylate_fastmaxsim.integrations import attention, decisions, packing


def test_a_cpu_is_no_reason_to_warn(model, caplog):
    pylate_fastmaxsim.enable()
    with caplog.at_level(logging.INFO, "pylate_fastmaxsim"):
        encode(model, batch_of(model))
    (record,) = [record for record in caplog.records if "not packed" in record.message]
    assert record.levelno == logging.INFO and "needs a CUDA device" in record.message


def _ignore_positions(model):
    forward = model[0].auto_model.forward
    model[0].auto_model.forward = lambda position_ids=None, **kwargs: forward(**kwargs)


def _take_no_positions(model):
    model[0].model_forward_params = model[0].model_forward_params - {"position_ids"}


def _raise_for_four_dimensional_masks(model):
    def check(_module, _args, kwargs):
        if kwargs["attention_mask"].dim() == 4:
            raise ValueError("no such mask\nand a long explanation")

    model[0].auto_model.register_forward_pre_hook(check, with_kwargs=True)


def _attend_to_other_documents(_model):
    def everything(query, key, value, cu_seqlens, max_length, **options):
        whole = torch.tensor([0, len(query)])
        return attend_to_own_document(query, key, value, whole, len(query), **options)

    attention.variable_length_attention = everything  # the fixture puts it back


def _forget_the_window(_model):
    def wide(*args, window, **options):
        return attend_to_own_document(*args, window=(-1, -1), **options)

    attention.variable_length_attention = wide


@pytest.mark.parametrize(
    "family, spoil, said",
    [
        ("bert", _ignore_positions, "BertModel cannot take packed documents (RuntimeError: The size"),
        ("modernbert", _take_no_positions, "takes no position_ids"),
        ("modernbert", _raise_for_four_dimensional_masks, "cannot take packed documents (ValueError: no such mask)."),
        ("modernbert", _attend_to_other_documents, "other token embeddings"),
        ("modernbert", _forget_the_window, "other token embeddings"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_first_batch_shows_an_encoder_that_cannot_be_packed(encoder, packed, caplog, family, spoil, said, dtype):
    model = load_model(encoder(family, max_position_embeddings=128)).to(dtype)
    spoil(model)
    pylate_fastmaxsim.enable()
    with caplog.at_level(logging.INFO, "pylate_fastmaxsim"):
        for seed in range(2):
            assert_encodes_as_stock(model, batch_of(model, seed), 1e-10 if dtype == torch.float64 else 1e-4)
    assert mode_of(model) == {"grouped"}
    (record,) = [record for record in caplog.records if "not packed" in record.message]
    assert said in record.message


def test_long_documents_are_looked_at_before_there_are_any(encoder, packed):
    model = load_model(encoder("modernbert")).double()
    _forget_the_window(model)
    pylate_fastmaxsim.enable()
    assert_encodes_as_stock(model, features(model, ["sea", "sand"], ["a", "the sea"]))
    assert mode_of(model) == {"grouped"}


def test_a_document_length_beyond_the_positions_of_an_encoder(encoder, packed):
    # RoBERTa counts from behind its padding token: 62 of the 64 positions are for tokens.
    model = load_model(encoder("xlm-roberta"), document_length=64).double()
    pylate_fastmaxsim.enable()
    batch = features(model, sentences(4, longest=4), sentences(4, longest=8), sentences(4, longest=40, seed=1))
    for column in batch[1:]:
        assert column["input_ids"].shape[1] == 64
        # PyLate pads with the mask token, which has a position.
        column["input_ids"][column["attention_mask"] == 0] = model[0].auto_model.config.pad_token_id
    assert_encodes_as_stock(model, batch)
    assert mode_of(model) == {"packed"}


@pytest.mark.parametrize("gap", [slice(1, 2), slice(0, 3)], ids=["inside", "in front"])
@pytest.mark.parametrize("collate", [collated, features])
def test_documents_with_gaps_are_not_packed(model, packed, monkeypatch, gap, collate):
    pylate_fastmaxsim.enable()
    assert_encodes_as_stock(model, batch_of(model, collate=collate))
    assert mode_of(model) == {"packed"}
    tokenize = type(model).tokenize

    def with_a_gap(self, *args, **kwargs):
        tokens = tokenize(self, *args, **kwargs)
        longest = tokens["attention_mask"].sum(dim=1).argmax()
        tokens["attention_mask"][longest, gap] = 0
        return tokens

    monkeypatch.setattr(type(model), "tokenize", with_a_gap)
    batch = batch_of(model, collate=collate)
    assert_encodes_as_stock(model, batch)
    assert all(call["attention_mask"].dim() == 2 for call in calls_of(model, lambda: encode(model, batch)))


class _LengthAware(Behind):
    """An encoder that looks at the padded length."""

    def change(self, features):
        features["token_embeddings"] = features["token_embeddings"].roll(features["input_ids"].shape[1] % 3, dims=-1)
        return features


def test_an_encoder_that_looks_at_the_padded_length_keeps_its_padding(model, packed, caplog):
    model[1] = _LengthAware(model[1])
    pylate_fastmaxsim.enable()
    assert_encodes_as_stock(model, batch_of(model))
    assert mode_of(model) == {"padded"}
    assert "with padding, as stock PyLate does" in caplog.text


def texts_of(words: int, count: int = 4) -> list[str]:
    return [" ".join(TEXT.split()[begin : begin + words]) for begin in range(count)]


@pytest.mark.parametrize("family", ["convbert", "fnet"])
def test_what_an_encoder_makes_of_padding_is_looked_at_before_there_is_any(encoder, mode, family):
    model = load_model(encoder(family)).double()
    pylate_fastmaxsim.enable()
    full = features(model, texts_of(2), texts_of(60))
    assert full[1]["attention_mask"].all()
    for batch in (full, batch_of(model)):
        assert_encodes_as_stock(model, batch)
    assert mode_of(model) == {"padded"}


@pytest.mark.parametrize("family", ["longrope", "dynamic rope"])
def test_rotary_positions_that_the_longest_text_of_a_call_scales(encoder, mode, family):
    pylate_fastmaxsim.enable()
    for length, modes in ((32, {"padded"}), (16, {mode})):
        model = load_model(encoder(family), document_length=length).double()
        for words in (13, 2):
            assert_encodes_as_stock(model, features(model, texts_of(2), texts_of(words)))
        assert mode_of(model) == modes


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "bfloat16 autocast"])
def test_documents_that_leak_by_less_than_rounding_hides(encoder, packed, caplog, autocast):
    model = load_model(encoder("lfm2", new_weights=True))
    pylate_fastmaxsim.enable()
    with caplog.at_level(logging.INFO, "pylate_fastmaxsim"), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        encode(model, batch_of(model))
    assert mode_of(model) == {"grouped"}
    assert "Lfm2Model lets the documents of a call see each other" in caplog.text


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "bfloat16 autocast"])
def test_attention_that_is_sharpened_far_into_a_row(encoder, packed, caplog, autocast):
    model = load_model(encoder("ministral3"))
    pylate_fastmaxsim.enable()
    with caplog.at_level(logging.INFO, "pylate_fastmaxsim"), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        encode(model, batch_of(model))
    assert mode_of(model) == {"grouped"}
    assert "Ministral3Model looks at the place of a token in its call, whatever its position" in caplog.text
    batch = batch_of(model, documents=24)
    assert sum(int(column["attention_mask"].sum()) for column in batch[1:]) > 256
    assert_encodes_as_stock(model, batch, tolerance=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_attention_that_takes_a_trace_of_the_neighbour(model, monkeypatch, caplog, dtype):
    def leaking(query, key, value, *args, **options):
        return attend_to_own_document(query, key, value, *args, **options) + 1e-7 * value.roll(1, 0)

    monkeypatch.setattr(attention, "variable_length_attention", leaking)
    model.to(dtype)
    pylate_fastmaxsim.enable()
    with caplog.at_level(logging.INFO, "pylate_fastmaxsim"):
        encode(model, batch_of(model))
    assert mode_of(model) == {"grouped"}
    assert "ModernBertModel lets the documents of a call see each other" in caplog.text


def test_a_distance_that_rounding_in_float32_does_not_explain(model, monkeypatch, caplog):
    def inexact(query, key, value, *args, **options):
        output = attend_to_own_document(query, key, value, *args, **options)
        return output * torch.linspace(1, 1.001, output.shape[-1])

    monkeypatch.setattr(attention, "variable_length_attention", inexact)
    model.float()
    pylate_fastmaxsim.enable()
    with caplog.at_level(logging.INFO, "pylate_fastmaxsim"):
        encode(model, batch_of(model))
    assert mode_of(model) == {"grouped"}
    (distance,) = re.findall(r"other token embeddings .*distance (\S+) between unit vectors", caplog.text)
    assert 1e-4 < float(distance) < 1e-3


class _Widening(Behind):
    """Turns vectors by an angle that grows with the width of a call, less than rounding to 16 bits does."""

    def change(self, features):
        embeddings = features["token_embeddings"]
        features["token_embeddings"] = embeddings + 1e-4 * embeddings.shape[1] * embeddings.roll(1, -1)
        return features


class _In16Bits(Behind):
    def change(self, features):
        if features["token_embeddings"].dtype == torch.float32:
            raise RuntimeError("16 bits only")
        return features


@pytest.mark.parametrize("kind, expected", [(_Widening, "padded"), (_In16Bits, "grouped")])
def test_what_padding_does_is_looked_at_without_autocast_where_that_can_be(encoder, kind, expected):
    model = load_model(encoder("modernbert"))
    model[1] = kind(model[1])
    pylate_fastmaxsim.enable()
    with torch.autocast("cpu", torch.bfloat16):
        encode(model, batch_of(model))
    assert mode_of(model) == {expected}


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
    """What a call may change beside gradients: buffers, and what modules keep in plain attributes."""
    plain = {
        (name, key): value
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, (bool, int, float, str, type(None)))
    }
    return {name: buffer.clone() for name, buffer in model.named_buffers()}, plain


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
        (_add_counter, "in training ModernBertModel with _Counting changes its buffers by all texts of a call"),
        (_add_own_norm, "in training ModernBertModel with _OwnNorm changes its buffers by all texts of a call"),
        (
            partial(_add_centre, dropout=0.5),
            "ModernBertModel with _Centred gives other token embeddings in training without padding",
        ),
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
    assert "with padding, as stock PyLate does: in training IBertModel changes its buffers" in caplog.text
    assert_encodes_as_stock(model.eval(), batch_of(model))


@pytest.mark.parametrize("family", ["longrope", "dynamic rope"])
def test_rotary_positions_are_as_before_the_trial(encoder, mode, family):
    model = load_model(encoder(family)).double()
    pylate_fastmaxsim.enable()
    assert assert_deciding_changes_nothing(model, batch_of(model)[1:]) == "padded"


def test_an_encoder_that_takes_no_row_longer_than_its_positions(encoder, packed, caplog):
    model = load_model(encoder("clip", max_position_embeddings=77), document_length=30).double()
    pylate_fastmaxsim.enable()
    batches = [batch_of(model, seed, count) for seed, count in enumerate((1, 6))]
    assert batches[1][1]["attention_mask"].sum() > 77
    with caplog.at_level(logging.INFO, "pylate_fastmaxsim"):
        for batch in batches:
            assert_encodes_as_stock(model, batch)
    assert mode_of(model) == {"grouped"}
    assert "CLIPTextModel cannot take packed documents (ValueError: Sequence length must be less" in caplog.text


def test_an_encoder_that_embeds_token_types_as_words(encoder, packed):
    model = load_model(encoder("gpt2")).double()
    pylate_fastmaxsim.enable()
    for seed in range(2):
        assert_encodes_as_stock(model, batch_of(model, seed))
    assert mode_of(model) == {"packed"}


def _refuse_beyond(limit, monkeypatch):
    def refusing(query, key, value, cu_seqlens, *args, **options):
        if cu_seqlens.diff().max() > limit:
            raise RuntimeError(f"texts of more than {limit} tokens")
        return attend_to_own_document(query, key, value, cu_seqlens, *args, **options)

    monkeypatch.setattr(attention, "variable_length_attention", refusing)


def test_rotary_positions_scaled_between_the_first_batch_and_the_widest(encoder, mode):
    model = load_model(encoder("dynamic rope", max_position_embeddings=24)).double()
    pylate_fastmaxsim.enable()
    for width in (20, 30):
        model.document_length = width
        batch = features(model, texts_of(2), [*texts_of(2), *texts_of(60)])
        assert batch[1]["input_ids"].shape[1] == width
        assert_encodes_as_stock(model, batch)
    assert mode_of(model) == {"padded"}


def test_a_limit_between_the_first_batch_and_the_widest(model, monkeypatch):
    _refuse_beyond(24, monkeypatch)
    pylate_fastmaxsim.enable()
    for width in (20, 30):
        model.document_length = width
        assert_encodes_as_stock(model, features(model, texts_of(2), texts_of(60)))
    assert mode_of(model) == {"grouped"}


def test_it_is_decided_anew_for_much_wider_batches(model, monkeypatch):
    _refuse_beyond(16, monkeypatch)
    pylate_fastmaxsim.enable()
    modes = []
    for width in (16, 64, 16):
        model.document_length = width
        batch = features(model, texts_of(2), texts_of(60))
        assert_encodes_as_stock(model, batch)
        modes.append(packing._mode(model, batch[1:], None))
    assert modes == ["packed", "grouped", "packed"]


def test_a_backward_that_is_still_to_come(encoder, mode):
    """BERT keeps its buffer of positions for it; the second batch is tried anew."""
    model = load_model(encoder("bert"), document_length=40).double()
    narrow = features(model, ["sea", "sand"], ["a", "the sea"])
    narrow[1] = {key: value[:, :8] for key, value in narrow[1].items()}
    wide = features(model, sentences(2, longest=8), sentences(2))
    loss_function = losses.Contrastive(model)
    pylate_fastmaxsim.enable()
    (loss_function(narrow, None) + loss_function(wide, None)).backward()
    assert model[0].auto_model.embeddings.position_embeddings.weight.grad.abs().sum() > 0


def test_every_width_takes_as_many_calls(encoder, packed):
    """Ranks of a sharded model whose batches differ in width have to make equally many."""

    def calls(width):
        model = load_model(encoder("bert"), document_length=width)
        made = []
        model[0].register_forward_pre_hook(lambda _module, _args: made.append(None))
        packing._mode(model, batch_of(model)[1:], None)
        return len(made)

    pylate_fastmaxsim.enable()
    assert calls(16) == calls(60)
