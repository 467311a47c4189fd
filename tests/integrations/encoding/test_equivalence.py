"""What the trial on the first batch finds out about an encoder."""

from __future__ import annotations

import logging

import pytest
import torch
from pylate import losses

import pylate_fastmaxsim
from pylate_fastmaxsim.integrations.encoding import attention as encoding_attention
from pylate_fastmaxsim.integrations.encoding import modes
from tests.support.compared import assert_equal, run
from tests.support.encoded import assert_encodes_as_stock, batch_of, calls_of, encode, mode_of
from tests.support.models import TEXT, attend_to_own_document, collated, features, load_model, sentences


def _ignore_positions(model):
    forward = model[0].auto_model.forward
    model[0].auto_model.forward = lambda position_ids=None, **kwargs: forward(**kwargs)


def _take_no_positions(model):
    model[0].model_forward_params = model[0].model_forward_params - {"position_ids"}


def _forget_the_window(_model):
    def wide(*args, window, **options):
        return attend_to_own_document(*args, window=(-1, -1), **options)

    encoding_attention.variable_length_attention = wide


@pytest.mark.parametrize(
    "family, spoil, said",
    [
        ("bert", _ignore_positions, "BertModel cannot take packed documents (RuntimeError: The size"),
        ("modernbert", _take_no_positions, "takes no position_ids"),
        ("modernbert", _forget_the_window, "other token embeddings"),
    ],
)
def test_the_first_batch_shows_an_encoder_that_cannot_be_packed(encoder, packed, caplog, family, spoil, said):
    model = load_model(encoder(family, max_position_embeddings=128)).double()
    spoil(model)
    pylate_fastmaxsim.enable(padding_free="always")  # some spoil it by a hook
    with caplog.at_level(logging.INFO, "pylate_fastmaxsim"):
        for seed in range(2):
            assert_encodes_as_stock(model, batch_of(model, seed))
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


@pytest.mark.parametrize(("gap", "collate"), [(slice(1, 2), collated), (slice(0, 3), features)])
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
    for length, expected in ((32, {"padded"}), (16, {mode})):
        model = load_model(encoder(family), document_length=length).double()
        for words in (13, 2):
            assert_encodes_as_stock(model, features(model, texts_of(2), texts_of(words)))
        assert mode_of(model) == expected


def test_documents_that_leak_by_less_than_rounding_hides(encoder, packed, caplog):
    model = load_model(encoder("lfm2", new_weights=True))
    pylate_fastmaxsim.enable()
    with caplog.at_level(logging.INFO, "pylate_fastmaxsim"), torch.autocast("cpu", torch.bfloat16):
        encode(model, batch_of(model))
    assert mode_of(model) == {"grouped"}
    assert "Lfm2Model lets the documents of a call influence each other" in caplog.text


def test_attention_that_is_sharpened_far_into_a_row(encoder, packed, caplog):
    model = load_model(encoder("ministral3"))
    caplog.set_level(logging.INFO, "pylate_fastmaxsim")
    pylate_fastmaxsim.enable()
    encode(model, batch_of(model))
    assert mode_of(model) == {"grouped"}
    assert "Ministral3Model uses the place of a token in its call (cache_position), not its position" in caplog.text
    batch = batch_of(model, documents=24)
    assert sum(int(column["attention_mask"].sum()) for column in batch[1:]) > 256
    assert_encodes_as_stock(model, batch, tolerance=1e-5)


def test_a_distance_that_rounding_in_float32_does_not_explain(model, monkeypatch, caplog):
    def inexact(query, key, value, *args, **options):
        output = attend_to_own_document(query, key, value, *args, **options)
        return output * torch.linspace(1, 1.001, output.shape[-1])

    monkeypatch.setattr(encoding_attention, "variable_length_attention", inexact)
    model.float()
    pylate_fastmaxsim.enable()
    with caplog.at_level(logging.INFO, "pylate_fastmaxsim"):
        encode(model, batch_of(model))
    assert mode_of(model) == {"grouped"}
    assert "other token embeddings" in caplog.text


def test_an_encoder_that_takes_no_row_longer_than_its_positions(encoder, packed, caplog):
    model = load_model(encoder("clip", max_position_embeddings=77), document_length=30).double()
    caplog.set_level(logging.INFO, "pylate_fastmaxsim")
    pylate_fastmaxsim.enable()
    for seed, count in enumerate((1, 6)):
        assert_encodes_as_stock(model, batch_of(model, seed, count))
    assert mode_of(model) == {"grouped"}
    assert "CLIPTextModel cannot take packed documents (ValueError: Sequence length must be less" in caplog.text


def test_rotary_positions_scaled_between_the_first_batch_and_the_widest(encoder, mode):
    model = load_model(encoder("dynamic rope", max_position_embeddings=24)).double()
    pylate_fastmaxsim.enable()
    for width in (20, 30):
        model.document_length = width
        batch = features(model, texts_of(2), [*texts_of(2), *texts_of(60)])
        assert batch[1]["input_ids"].shape[1] == width
        assert_encodes_as_stock(model, batch)
    assert mode_of(model) == {"padded"}


def test_it_is_decided_anew_for_much_wider_batches(model, monkeypatch):
    def refusing(query, key, value, cu_seqlens, *args, **options):
        if cu_seqlens.diff().max() > 16:
            raise RuntimeError("texts of more than 16 tokens")
        return attend_to_own_document(query, key, value, cu_seqlens, *args, **options)

    monkeypatch.setattr(encoding_attention, "variable_length_attention", refusing)
    pylate_fastmaxsim.enable()
    found = []
    for width in (16, 64, 16):
        model.document_length = width
        batch = features(model, texts_of(2), texts_of(60))
        assert_encodes_as_stock(model, batch)
        found.append(modes.mode_for(model, batch[1:], None))
    assert found == ["packed", "grouped", "packed"]


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


@pytest.mark.parametrize("padding_free", [True, False])
def test_an_encoder_that_replaces_its_attention_for_short_texts(encoder, padding_free, caplog):
    """BigBird does so for good; calls that only look at it must not."""
    model = load_model(encoder("bigbird", max_position_embeddings=128), document_length=96, query_length=48).double()
    batch = features(model, sentences(4, longest=20), sentences(4, longest=80, seed=1))
    stock = run(losses.Contrastive(model), batch)
    pylate_fastmaxsim.enable(stock_masking=True, padding_free=padding_free)
    assert_equal(run(losses.Contrastive(model), batch), stock)
    assert model[0].auto_model.attention_type == "block_sparse"
    assert ("replaces its modules by the lengths of the texts in a call" in caplog.text) == padding_free
