"""Models that a recipe makes before it trains: a small ModernBERT with random weights, and a table of token vectors."""

import string
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path

import torch
from datasets import Dataset
from huggingface_hub.errors import StrictDataclassError
from sentence_transformers.models import Transformer
from tokenizers import Tokenizer, normalizers, pre_tokenizers, processors
from tokenizers import models as tokenizer_models
from tokenizers.trainers import BpeTrainer
from transformers import LlamaConfig, LlamaModel, ModernBertConfig, PreTrainedTokenizerFast, set_seed

from pylate_fastmaxsim.recipes.config.kinds import POSITIONS, BuildSection, ColBERTSection, TextModelSection
from pylate_fastmaxsim.recipes.errors import as_recipe_error
from pylate_fastmaxsim.recipes.kind import Kind
from pylate_fastmaxsim.recipes.models.load import load_model

SPECIAL_TOKENS = {
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
}
# What libraries raise for a size or an option that a model cannot have, or an attention that is not installed.
BAD_VALUE = (ValueError, TypeError, RuntimeError, LookupError, AssertionError, ImportError, StrictDataclassError)
PREFIXES = ["[Q] ", "[D] "]  # of queries and documents; PyLate adds them to a tokenizer that lacks them


def build_model(kind: Kind, section: TextModelSection, rows: Dataset, seed: int, directory: Path) -> None:
    """Train a tokenizer on the texts of rows, draw the weights from ``seed``, and save a ColBERT or a SPLADE in ``directory``."""
    tokenizer = train_tokenizer(_texts(rows), section.build.vocab_size)
    set_seed(seed)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        with as_recipe_error("model cannot be built", BAD_VALUE):
            kind.encoder_class(_configuration(section.build, tokenizer)).save_pretrained(folder)
            set_seed(seed)
            model = kind.from_encoder(section.loaded_from(folder), "cpu")
    model.save(str(directory), create_model_card=False)


def _configuration(build: BuildSection, tokenizer: PreTrainedTokenizerFast) -> ModernBertConfig:
    options = asdict(build)
    dropout = options.pop("dropout")
    options["vocab_size"] = len(tokenizer)
    return ModernBertConfig(
        **options,
        max_position_embeddings=POSITIONS,
        **dict.fromkeys(("embedding_dropout", "attention_dropout", "mlp_dropout"), dropout),
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.cls_token_id,
        eos_token_id=tokenizer.sep_token_id,
        cls_token_id=tokenizer.cls_token_id,
        sep_token_id=tokenizer.sep_token_id,
    )


def _texts(rows: Dataset) -> Iterator[str]:
    """Every text of every column, those in lists of documents included."""
    for row in rows:
        for value in row.values():
            yield from (text for text in (value if isinstance(value, list) else [value]) if isinstance(text, str))


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A lower-cased BPE tokenizer with BERT's special tokens and words, and PyLate's prefixes.

    BPE rather than WordPiece: the WordPiece trainer numbers its tokens in a different order each time.
    Every printable ASCII character is in the vocabulary, so that PyLate's punctuation skiplist finds
    a token for each of its marks.
    """
    tokenizer = Tokenizer(tokenizer_models.BPE(unk_token=SPECIAL_TOKENS["unk_token"]))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = BpeTrainer(
        vocab_size=vocab_size - len(PREFIXES),
        special_tokens=list(SPECIAL_TOKENS.values()),
        initial_alphabet=list(string.ascii_letters + string.digits + string.punctuation),
        limit_alphabet=256,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens(PREFIXES)
    cls, sep = SPECIAL_TOKENS["cls_token"], SPECIAL_TOKENS["sep_token"]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{cls} $A {sep}", special_tokens=[(token, tokenizer.token_to_id(token)) for token in (cls, sep)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=POSITIONS,
        model_input_names=["input_ids", "attention_mask"],  # without token types, which ModernBERT refuses
        **SPECIAL_TOKENS,
    )


def build_token_table(section: ColBERTSection, seed: int, directory: Path) -> None:
    """Save a table of the token vectors of ``section.token_table`` as a ColBERT in ``directory``.

    A text is its own tokens and nothing else: no special tokens, prefixes, skipped words or query expansion, which a
    table would give the same vector in every text.
    """
    # Of PyLate, beside which not every kind of model is trained.
    from pylate.models import ColBERT, Dense

    from pylate_fastmaxsim.integrations.pylate.static import plain_tokenizer, token_vectors

    source = load_model(
        ColBERTSection(name_or_path=section.token_table, trust_remote_code=section.trust_remote_code),
        "cpu",
        seed,
        "model.token_table",
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
        max_position_embeddings=POSITIONS,
        pad_token_id=source.tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=None,
    )
    encoder = LlamaModel(config)
    with torch.no_grad():
        encoder.embed_tokens.weight.copy_(vectors)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=plain_tokenizer(source.tokenizer),
        model_max_length=POSITIONS,
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
