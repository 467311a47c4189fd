"""colpali-engine's models of pages."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from colpali_engine import models
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from pylate_fastmaxsim.recipes.config.schema import LoraSection, ModelSection
from pylate_fastmaxsim.recipes.models.hardware import gpu_has_bf16
from pylate_fastmaxsim.recipes.models.retriever import VisualRetriever

CLASSES = {
    "colpali": (models.ColPali, models.ColPaliProcessor),
    "colqwen2": (models.ColQwen2, models.ColQwen2Processor),
}


def load(
    section: ModelSection, device: torch.device | str, key: str, checkpoint: Path | None = None
) -> VisualRetriever:
    """The model of a section; adapters that it lacks are drawn from the random numbers in force.

    Parameters
    ----------
    section
        A section of ``kind`` colpali or colqwen2.
    device
        Where the weights go.
    key
        What an error calls the model.
    checkpoint
        A checkpoint of the training of this section, whose weights are taken.
    """
    model_class, processor_class = CLASSES[section.kind]
    limits = {} if section.max_visual_tokens is None else {"max_num_visual_tokens": section.max_visual_tokens}
    processor = processor_class.from_pretrained(section.name_or_path, **limits)
    adapted = section.lora is not None
    model = model_class.from_pretrained(
        section.name_or_path if adapted or checkpoint is None else checkpoint,
        dtype=_dtype(section, torch.device(device)),
        attn_implementation=section.attn_implementation,
    )
    work_around_transformers(model)
    if adapted and checkpoint is None:
        model = get_peft_model(model, _lora(section.lora))
    elif adapted:
        model = PeftModel.from_pretrained(model, checkpoint)
    return VisualRetriever(model.to(device), processor)


def tokenizer_of(retriever: VisualRetriever) -> PreTrainedTokenizerBase:
    """The tokenizer of a model's queries."""
    return retriever.processor.tokenizer


def _dtype(section: ModelSection, device: torch.device) -> torch.dtype:
    if section.dtype != "auto":
        return getattr(torch, section.dtype)
    small = section.lora is not None and device.type == "cuda" and gpu_has_bf16()
    return torch.bfloat16 if small else torch.float32


def _lora(section: LoraSection) -> LoraConfig:
    options = asdict(section)
    if section.init_lora_weights == "default":
        options["init_lora_weights"] = True
    return LoraConfig(**options, bias="none", task_type="FEATURE_EXTRACTION")


def work_around_transformers(model: PreTrainedModel) -> None:
    """Work around bugs of colpali-engine 0.3.18 with transformers 5.3, stock and fast alike."""
    # Saved under the original names, weights could not be loaded again.
    model.save_pretrained = partial(model.save_pretrained, save_original_format=False)
    if isinstance(model, models.ColPali):
        # colpali-engine leaves the unused language model head untied, without weights that could move to a GPU.
        model.model.tie_weights()
    # Not a hook: adapters call forward directly.
    model.forward = partial(_forward, model)


def _forward(model: PreTrainedModel, *args: Any, **kwargs: Any) -> Tensor:
    if isinstance(model, models.ColQwen2):
        # Otherwise positions of texts use the offsets of the last batch of images, and fail if its size differs.
        model.rope_deltas = None
    else:
        # Required in training; 0 (prompt) is also what queries have in evaluation.
        kwargs.setdefault("token_type_ids", torch.zeros_like(kwargs["input_ids"]))
    return type(model).forward(model, *args, **kwargs)
