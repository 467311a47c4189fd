"""The model of a recipe, loaded from the Hub or from disk."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from pylate import models
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase, set_seed

from pylate_fastmaxsim.integrations.log import log_once
from pylate_fastmaxsim.recipes.config.schema import ModelSection
from pylate_fastmaxsim.recipes.errors import RecipeError, first_line

if TYPE_CHECKING:
    from pylate_fastmaxsim.recipes.models.visual import VisualRetriever

NO_TOKENIZER = "{} {} has no tokenizer that can be loaded; it must be saved beside the model."
MODEL_FILES = (".json", ".safetensors", ".bin", ".model", ".txt")


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
        model = new_colbert(section, device)
    except RecipeError:
        raise
    except Exception as error:  # weights, tokenizer and configuration are read by libraries with errors of their own
        raise model_failure(key, section, error) from error
    if is_empty(model.tokenizer):
        raise RecipeError(NO_TOKENIZER.format(key, section.name_or_path))
    _check_embedding_size(section, model, key)
    check_lengths(section, model)
    config = model[0].auto_model.config
    # transformers drops them without a word.
    if unknown := [name for name in section.config_kwargs if not hasattr(config, name)]:
        log_once(
            "model.config_kwargs is left out where %s has no such value: %s.", type(config).__name__, ", ".join(unknown)
        )
    return model


def new_colbert(section: ModelSection, device: torch.device | str) -> models.ColBERT:
    """PyLate's model with the arguments of a section, as it is loaded."""
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
    own = new_colbert(replace(section, embedding_size=None), "cpu")  # a checkpoint may have several itself
    if len(own) < len(model):
        size = own[-1].out_features
        raise RecipeError(
            f"model.embedding_size must be {size} or null, because {key} {section.name_or_path} ends with a projection of "
            f"that size, got {section.embedding_size}."
        )


def check_lengths(section: ModelSection, model: models.ColBERT) -> None:
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
