"""What steps are made of: an encoder with random weights, and texts of random words.

Speed and memory do not depend on the values of weights. Texts have log-normal lengths like those of MS MARCO passages.
"""

from __future__ import annotations

import random
from pathlib import Path

import torch

from benchmarks.harness.lengths import MEAN_TOKENS, log_normal

QUERY_LENGTH = 32
DOCUMENT_LENGTH = 300
SPECIAL_TOKENS = 3  # [CLS], the document prefix and [SEP]
VOCABULARY = 30_000
# Qwen3-Embedding-0.6B; the defaults of the others are their base, of EuroBERT 210m.
ENCODERS = {
    "modernbert": {},
    "bert": {},
    "mpnet": {},
    "eurobert": {},
    "qwen3": {
        "vocab_size": 151_669,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": True,
    },
}


def save_encoder(
    directory: Path,
    layers: int | None,
    encoder: str = "modernbert",
    masked_lm: bool = False,
    hidden: int | None = None,
) -> None:
    """An encoder with random weights and a word-level tokenizer, for a trial with fewer layers or another hidden size.

    ``masked_lm``: with the head that predicts words.
    """
    from tokenizers import Tokenizer, pre_tokenizers, processors
    from tokenizers import models as token_models
    from transformers import AutoConfig, AutoModel, AutoModelForMaskedLM, PreTrainedTokenizerFast

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = {word: index for index, word in enumerate([*special, *(f"w{i}" for i in range(VOCABULARY))])}
    tokenizer = Tokenizer(token_models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", vocabulary["[CLS]"]), ("[SEP]", vocabulary["[SEP]"])]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        **{f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")},
    ).save_pretrained(directory)
    torch.manual_seed(0)
    ids = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
    ids |= {"cls_token_id": 2, "sep_token_id": 3} if encoder == "modernbert" else {}
    sizes = {}
    if hidden is not None:
        sizes = {"hidden_size": hidden, "intermediate_size": 4 * hidden, "num_attention_heads": max(1, hidden // 64)}
    config = AutoConfig.for_model(encoder, **ENCODERS[encoder], **ids, **sizes)
    if layers is not None:
        config.num_hidden_layers = layers
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:layers]
    (AutoModelForMaskedLM if masked_lm else AutoModel).from_config(config).save_pretrained(directory)


def build_model(directory: Path, layers: int | None, document_length: int, encoder: str = "modernbert"):
    """A PyLate model around such an encoder."""
    from pylate import models

    save_encoder(directory, layers, encoder)
    return models.ColBERT(
        model_name_or_path=str(directory),
        query_length=QUERY_LENGTH,
        document_length=document_length,
        skiplist_words=[],
        device="cpu",
    )


def words(count: int, draw: random.Random) -> str:
    """A text of so many random words, one at least."""
    return " ".join(f"w{draw.randrange(VOCABULARY)}" for _ in range(max(count, 1)))


def make_rows(
    count: int, negatives: int, loss: str, draw: random.Random, mean_tokens: float = MEAN_TOKENS
) -> list[dict]:
    """Rows of random words: a query, a positive and negatives. Documents have ``mean_tokens`` on average.

    For distillation the documents are in one column, with a teacher score for each.
    """

    def row() -> dict:
        query = words(draw.randint(4, 12), draw)
        documents = [words(log_normal(mean_tokens - SPECIAL_TOKENS, draw), draw) for _ in range(1 + negatives)]
        if loss == "distillation":
            return {"query": query, "documents": documents, "scores": [draw.random() for _ in documents]}
        columns = ["positive", *(f"negative_{i}" for i in range(negatives))]
        return {"query": query, **dict(zip(columns, documents, strict=True))}

    return [row() for _ in range(count)]
