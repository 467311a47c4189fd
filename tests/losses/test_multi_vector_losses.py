"""``encode`` and losses of a MultiVectorEncoder: texts in one row, and queries that share a call with documents."""

import pytest
import torch

import pylate_fastmaxsim
from pylate_fastmaxsim import encode
from pylate_fastmaxsim.integrations.sentence_transformers.padding_free import LossColumns
from pylate_fastmaxsim.losses import ContrastiveDistillation, Matryoshka
from tests.support.compared import run
from tests.support.loss_hosts import HOST, LABELS, VIEWS, ByHand, batch_of


@pytest.mark.parametrize(
    "make, joined",
    [
        (ByHand, True),
        (ContrastiveDistillation, True),
        (lambda model: ContrastiveDistillation(model, mini_batch_size=3), False),
        (lambda model: Matryoshka(model, HOST.loss("contrastive", model), **VIEWS), True),
    ],
    ids=["by hand", "both", "both, cached", "cut"],
)
def test_queries_share_a_call_with_packed_documents(encoder, mode, monkeypatch, make, joined):
    model, calls, keep = HOST.load(encoder("bert")), [], LossColumns.keep
    monkeypatch.setattr(LossColumns, "keep", lambda *args: calls.append(None) or keep(*args))
    pylate_fastmaxsim.enable()
    run(make(model), batch_of(model), LABELS)
    assert len(calls) == (joined and mode == "packed")


def test_texts_in_one_row(encoder):
    model = HOST.load(encoder("bert"))
    batch = batch_of(model)
    stock = encode(model, batch)
    padded = [model(dict(column), task=column["task"]) for column in batch]
    flat = [
        {"input_ids": torch.zeros(1, 3 * index + 9), "cu_seq_lens_q": torch.arange(len(column["input_ids"]) + 1)}
        for index, column in enumerate(batch)
    ]
    outputs = {column["input_ids"].shape[1]: output for column, output in zip(flat, padded, strict=True)}
    model.forward = lambda features, **_: outputs[features["input_ids"].shape[1]]
    for ours, theirs in zip(encode(model, flat), stock, strict=True):
        for own, other in zip(ours.to_padded(), theirs.to_padded(), strict=True):
            torch.testing.assert_close(own, other)
