"""A ColBERT whose encoder is a table of token vectors, begun from those of another ColBERT."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from pylate.models import ColBERT, Dense
from sentence_transformers.models import Transformer
from transformers import LlamaConfig, LlamaModel, PreTrainedTokenizerFast

from pylate_fastmaxsim.integrations.pylate.static import plain_tokenizer, token_vectors
from pylate_fastmaxsim.recipes.config.kinds import ColBERTSection
from pylate_fastmaxsim.recipes.models.load import load_model

KEY = "model.token_table"
LONGEST = 8192  # tokens of a text; a table has no positions that could run out


def build_token_table(section: ColBERTSection, seed: int, directory: Path) -> None:
    """Save a table of the token vectors of ``section.token_table`` as a ColBERT in ``directory``.

    A text is its own tokens and nothing else: no special tokens, prefixes, skipped words or query expansion, which a
    table would give the same vector in every text.
    """
    source = load_model(
        ColBERTSection(name_or_path=section.token_table, trust_remote_code=section.trust_remote_code), "cpu", seed, KEY
    )
    vectors = token_vectors(source)
    vocabulary, size = vectors.shape
    # Without layers this encoder is an embedding table and a norm; it adds no positions.
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=size,
        num_hidden_layers=0,
        num_attention_heads=1,
        intermediate_size=1,
        max_position_embeddings=LONGEST,
        pad_token_id=source.tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=None,
    )
    encoder = LlamaModel(config)
    with torch.no_grad():
        encoder.embed_tokens.weight.copy_(vectors)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=plain_tokenizer(source.tokenizer),
        model_max_length=LONGEST,
        model_input_names=["input_ids", "attention_mask"],
        **source.tokenizer.special_tokens_map,
    )
    with tempfile.TemporaryDirectory() as folder:
        encoder.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        table = Transformer(folder, do_lower_case=source[0].do_lower_case)
    projection = Dense(size, size, bias=False, init_weight=torch.eye(size))
    model = ColBERT(
        modules=[table, projection],
        device="cpu",
        query_prefix="",
        document_prefix="",
        query_length=section.query_length or source.query_length,
        document_length=section.document_length or source.document_length,
        do_query_expansion=False,
        skiplist_words=[],
    )
    model.save(str(directory), create_model_card=False)
