"""The model of a recipe: loaded from the Hub or disk, or a small ModernBERT made from scratch."""

from __future__ import annotations

import os
import string
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from pylate import models
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer, normalizers, pre_tokenizers, processors
from tokenizers import models as tokenizer_models
from tokenizers.trainers import BpeTrainer
from transformers import (
    AutoConfig,
    AutoTokenizer,
    ModernBertConfig,
    ModernBertModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    set_seed,
)

from pylate_fastmaxsim.integrations.log import log_once
from pylate_fastmaxsim.recipes.config.schema import BuildSection, ModelSection, RecipeError, first_line

if TYPE_CHECKING:
    from pylate_fastmaxsim.recipes.models.visual import VisualRetriever

SPECIAL_TOKENS = {
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
}
NO_TOKENIZER = "{} {} has no tokenizer that can be loaded; it must be saved beside the model."
MODEL_FILES = (".json", ".safetensors", ".bin", ".model", ".txt")
# What a size or an option that a model cannot have is met with, up to no memory for it.
BAD_VALUE = (ValueError, TypeError, RuntimeError, LookupError, AssertionError)
PREFIXES = ["[Q] ", "[D] "]  # of queries and documents; PyLate adds them to a tokenizer that lacks them


def load_model(
    section: ModelSection, device: torch.device | str, seed: int, key: str = "model.name_or_path"
) -> models.ColBERT | VisualRetriever:
    """A ColBERT model or one of pages; a projection or adapters that the checkpoint lacks are drawn from ``seed``.

    ``key`` is what an error says of the recipe.
    """
    visual = _visual(section) if section.visual else None
    set_seed(seed)
    try:
        if visual is not None:
            retriever = visual.load_retriever(section, device)
            if is_empty(retriever.processor.tokenizer):
                raise RecipeError(NO_TOKENIZER.format(key, section.name_or_path))
            return retriever
        model = _colbert(section, device)
    except RecipeError:
        raise
    except Exception as error:  # weights, tokenizer and configuration are read by libraries with errors of their own
        raise model_failure(key, section, error) from error
    if is_empty(model.tokenizer):
        raise RecipeError(NO_TOKENIZER.format(key, section.name_or_path))
    _check_embedding_size(section, model, key)
    _check_lengths(section, model)
    config = model[0].auto_model.config
    # transformers drops them without a word.
    if unknown := [name for name in section.config_kwargs if not hasattr(config, name)]:
        log_once(
            "model.config_kwargs is left out where %s has no such value: %s.", type(config).__name__, ", ".join(unknown)
        )
    return model


def _colbert(section: ModelSection, device: torch.device | str) -> models.ColBERT:
    return models.ColBERT(
        model_name_or_path=section.name_or_path,
        device=str(device),
        embedding_size=section.embedding_size,
        query_length=section.query_length,
        document_length=section.document_length,
        do_query_expansion=section.do_query_expansion,
        attend_to_expansion_tokens=section.attend_to_expansion_tokens,
        config_kwargs=dict(section.config_kwargs),
        trust_remote_code=section.trust_remote_code,
    )


def _check_embedding_size(section: ModelSection, model: models.ColBERT, key: str) -> None:
    """Refuse a size to which PyLate has added a projection with random weights behind a trained one of another size.

    It warns of that, which the commands do not show.
    """
    if section.embedding_size is None or len(model) <= 2:
        return  # an encoder with one projection, which is the checkpoint's or was added because it has none
    own = _colbert(replace(section, embedding_size=None), "cpu")  # a checkpoint may have several itself
    if len(own) < len(model):
        size = own[-1].out_features
        raise RecipeError(
            f"model.embedding_size must be {size} or null, because {key} {section.name_or_path} ends with a projection of "
            f"that size, got {section.embedding_size}."
        )


def _check_lengths(section: ModelSection, model: models.ColBERT) -> None:
    """Refuse lengths that the encoder has no positions for: PyLate pads to them, whatever the texts are.

    A table of positions ends. Rotary positions do not, and documents longer than the encoder was made for are in use;
    queries are not, and PyLate pads every query.
    """
    encoder = model[0].auto_model
    # Of RoBERTa and its kin the positions of a text begin behind that of padding.
    learned = [
        table.num_embeddings - (0 if table.padding_idx is None else table.padding_idx + 1)
        for name, table in encoder.named_modules()
        if name.endswith("position_embeddings") and isinstance(table, torch.nn.Embedding)
    ]
    made_for = getattr(encoder.config, "max_position_embeddings", None)
    for key, limit in {
        "query_length": min(learned, default=made_for),
        "document_length": min(learned, default=None),
    }.items():
        length = getattr(section, key)
        if length is not None and limit is not None and length > limit:
            raise RecipeError(
                f"model.{key} must be at most {limit}, as many positions as {type(encoder).__name__} has, got {length}."
            )


def model_failure(key: str, section: ModelSection, error: Exception) -> RecipeError:
    """The sentence for an error of the libraries that load the model that ``key`` names."""
    name = section.name_or_path
    # Of a file that may not be read they say that it is not there, or that there is no tokenizer.
    files = [path for depth in ("*", "*/*") for path in Path(name).glob(depth) if path.suffix in MODEL_FILES]
    if file := next((path for path in files if not os.access(path, os.R_OK)), None):
        return RecipeError(f"{key} {name} cannot be loaded: {file} cannot be read.")
    if file := next(filter(_is_cut, files), None):  # of which safetensors does not say the name
        return RecipeError(
            f"{key} {name} cannot be loaded: {file} is not whole, as after a download that was cut short or a clone "
            "without Git LFS."
        )
    if lacks_tokenizer(section):
        return RecipeError(NO_TOKENIZER.format(key, name))
    reason = repr(error) if isinstance(error, KeyError) else first_line(error)  # it says no more than the key
    return RecipeError(f"{key} {name} cannot be loaded: {reason}")


def _is_cut(file: Path) -> bool:
    """Whether a file of weights has another size than it begins with, or does not begin as one."""
    if file.suffix != ".safetensors":
        return False
    try:
        with safe_open(file, framework="pt"):
            return False
    except SafetensorError:
        return True


def lacks_tokenizer(section: ModelSection) -> bool:
    """Whether the model is there and its tokenizer is not: transformers says so in many ways, none of them plain."""
    options = {"trust_remote_code": section.trust_remote_code}
    try:
        AutoConfig.from_pretrained(section.name_or_path, **options)
    except Exception:
        return False
    try:
        AutoTokenizer.from_pretrained(section.name_or_path, **options)
    except Exception:
        return True
    return False


def is_empty(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether it knows nothing but special tokens: transformers 5 makes such a one up where a model has none."""
    return set(tokenizer.get_vocab()) <= {*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()}


def gpu_has_bf16() -> bool:
    """Whether the GPU computes in bf16. An older one emulates it, slower than fp32, which PyTorch counts by default."""
    return torch.cuda.is_bf16_supported(including_emulation=False)


def load_trained(
    section: ModelSection, checkpoint: Path, device: torch.device | str
) -> models.ColBERT | VisualRetriever:
    """The model of a section with the weights of a checkpoint of its training."""
    if section.visual:
        return _visual(section).load_retriever(section, device, checkpoint)
    return load_model(replace(section, name_or_path=str(checkpoint)), device, 0, key="output_dir")


def _visual(section: ModelSection) -> ModuleType:
    try:
        from pylate_fastmaxsim.recipes.models import visual
    except ModuleNotFoundError as error:
        raise RecipeError(
            f'model.kind {section.kind} needs colpali-engine: pip install "pylate-fastmaxsim[recipes,colpali]" ({error}).'
        ) from error
    return visual


@contextmanager
def _one_sentence() -> Iterator[None]:
    try:
        yield
    except BAD_VALUE as error:
        raise RecipeError(f"model cannot be built: {first_line(error)}") from error


def build_model(section: ModelSection, texts: Iterable[str], seed: int, directory: Path) -> None:
    """Train a tokenizer on ``texts``, draw the weights from ``seed``, and save a ColBERT model in ``directory``."""
    tokenizer = train_tokenizer(texts, section.build.vocab_size)
    set_seed(seed)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        with _one_sentence():
            encoder = ModernBertModel(_configuration(section.build, tokenizer))
        encoder.save_pretrained(folder)
        set_seed(seed)
        with _one_sentence():
            model = _colbert(replace(section, build=None, name_or_path=folder), "cpu")
    _check_lengths(section, model)
    model.save(str(directory), create_model_card=False)


def _configuration(build: BuildSection, tokenizer: PreTrainedTokenizerFast) -> ModernBertConfig:
    return ModernBertConfig(
        vocab_size=len(tokenizer),
        hidden_size=build.hidden_size,
        num_hidden_layers=build.num_hidden_layers,
        num_attention_heads=build.num_attention_heads,
        intermediate_size=build.intermediate_size,
        local_attention=build.local_attention,
        global_attn_every_n_layers=build.global_attn_every_n_layers,
        embedding_dropout=build.dropout,
        attention_dropout=build.dropout,
        mlp_dropout=build.dropout,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.cls_token_id,
        eos_token_id=tokenizer.sep_token_id,
        cls_token_id=tokenizer.cls_token_id,
        sep_token_id=tokenizer.sep_token_id,
    )


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
        model_max_length=8192,
        model_input_names=["input_ids", "attention_mask"],  # transformers 4 adds token types, which ModernBERT refuses
        **SPECIAL_TOKENS,
    )
