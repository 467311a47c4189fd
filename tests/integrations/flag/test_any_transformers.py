"""Losses with any transformers that PyLate can be installed with: what else is tested here needs transformers 5."""

from functools import partial

import pytest
import torch

pytest.importorskip("pylate")

from pylate import losses, models, utils
from tokenizers import Tokenizer, pre_tokenizers, processors
from tokenizers import models as token_models
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

import pylate_fastmaxsim

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
TEXTS = [(f"w{i} w1", f"w{i} w2 " * (i + 1), f"w{i + 7} w3 w4 " * (6 - i)) for i in range(6)]
ROWS = [dict(zip(("query", "positive", "negative"), row, strict=True)) for row in TEXTS]


@pytest.fixture
def model(tmp_path):
    words = {word: index for index, word in enumerate([*SPECIAL, *(f"w{i}" for i in range(20))])}
    tokenizer = Tokenizer(token_models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    ends = [(word, words[word]) for word in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    names = {f"{word[1:-1].lower()}_token": word for word in SPECIAL}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(tmp_path)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    undropped = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    BertModel(BertConfig(vocab_size=len(words), **sizes, **undropped)).save_pretrained(tmp_path)
    return models.ColBERT(str(tmp_path), embedding_size=16, document_length=24, query_length=8, device="cpu").train()


@pytest.mark.parametrize("make", [losses.Contrastive, partial(losses.CachedContrastive, mini_batch_size=4)])
def test_loss_and_gradients_are_those_of_stock(model, make):
    def run():
        batch = utils.ColBERTCollator(tokenize_fn=model.tokenize)([dict(row) for row in ROWS])
        columns = [
            {key.removeprefix(f"{name}_"): value for key, value in batch.items() if key.startswith(f"{name}_")}
            for name in ROWS[0]
        ]
        model.zero_grad(set_to_none=True)
        loss = make(model)(columns, None)
        loss.backward()
        return [loss.detach(), *(weight.grad for weight in model.parameters() if weight.grad is not None)]

    expected = run()
    with pylate_fastmaxsim.enabled(stock_masking=True):
        ours = run()
    assert len(ours) == len(expected)
    for own, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(own, other, atol=1e-4, rtol=1e-4)
