"""Full training steps of ColPali and ColQwen2 at their real sizes: stock colpali-engine and this package.

    python -m benchmarks page_step                        # measure what is missing, then print the table
    python -m benchmarks page_step --kinds colqwen2 --batches 16 32

A step is the forward of queries and pages, ``ColbertLoss`` over the batch, backward and AdamW on LoRA adapters, in bf16
autocast over bf16 weights with gradient checkpointing, as in the recipes. Weights, queries and pixels are random: speed
and memory do not depend on their values. Each cell runs in a process of its own.
"""

from __future__ import annotations

import argparse
import itertools
import os
from importlib.metadata import version

import torch

import pylate_fastmaxsim
from benchmarks.harness.timing import DEVICE
from benchmarks.training import steps
from benchmarks.training.steps import measured, run, steps_table  # noqa: F401

TIMEOUT = 480
PATHS = {"stock": "colpali-engine", "fast": "colpali-engine + pylate-fastmaxsim"}
QUERY_TOKENS = 25
# Of the published models. Vision of Qwen2-VL has the defaults of transformers otherwise.
TEXT = {
    "colpali": {
        "model_type": "gemma",
        "vocab_size": 257_216,
        "hidden_size": 2048,
        "intermediate_size": 16_384,
        "num_hidden_layers": 18,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "pad_token_id": 0,
    },
    "colqwen2": {
        "vocab_size": 151_936,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": 0,
    },
}
VISION = {
    "colpali": {
        "model_type": "siglip_vision_model",
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "image_size": 448,
        "patch_size": 14,
        "vision_use_head": False,
    },
    "colqwen2": {"hidden_size": 1536},
}
GRID = {"colpali": (32, 32), "colqwen2": (32, 24)}  # visual tokens of a page
PROMPT = [3, 4, 5, 6, 7, 8]
IMAGE, VISION_START, VISION_END, VIDEO = 10, 11, 12, 13
TARGETS = ".*language_model.*(down_proj|gate_proj|up_proj|k_proj|q_proj|v_proj|o_proj).*|.*custom_text_proj.*"


def build_model(kind: str):
    """A model with random weights on the default device and of the default dtype, and adapters on it."""
    from colpali_engine.models import ColPali, ColQwen2
    from peft import LoraConfig, get_peft_model
    from transformers import PaliGemmaConfig, Qwen2VLConfig

    from pylate_fastmaxsim.recipes.kinds.pages import work_around_transformers

    text, vision = dict(TEXT[kind]), dict(VISION[kind])
    if kind == "colpali":
        size = text["hidden_size"]
        config = PaliGemmaConfig(text_config=text, vision_config=vision, image_token_index=IMAGE, projection_dim=size)
        model = ColPali(config)
    else:
        tokens = {"image_token_id": IMAGE, "video_token_id": VIDEO}
        tokens |= {"vision_start_token_id": VISION_START, "vision_end_token_id": VISION_END}
        model = ColQwen2(Qwen2VLConfig(text_config=text, vision_config=vision, **tokens))
    work_around_transformers(model)
    options = {"r": 32, "lora_alpha": 32, "lora_dropout": 0.1, "init_lora_weights": "gaussian", "bias": "none"}
    return get_peft_model(model, LoraConfig(target_modules=TARGETS, task_type="FEATURE_EXTRACTION", **options))


def make_pages(kind: str, batch: int) -> dict:
    """Pages of one size, as from the processor of a model."""
    height, width = GRID[kind]
    visual = [IMAGE] * (height * width)
    row = visual + PROMPT if kind == "colpali" else [PROMPT[0], VISION_START, *visual, VISION_END, *PROMPT]
    ids = torch.tensor([row] * batch)
    pages = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if kind == "colpali":
        pixels = torch.rand(batch, 3, 14 * height, 14 * width)
        nothing = torch.full_like(ids, -100)
        return pages | {"pixel_values": pixels, "token_type_ids": torch.zeros_like(ids), "labels": nothing}
    # Four patches of 14 x 14 pixels, twice, in three colours, make a visual token.
    patches = torch.rand(batch, 4 * height * width, 3 * 2 * 14 * 14)
    grid = torch.tensor([[1, 2 * height, 2 * width]] * batch)
    return pages | {"pixel_values": patches, "image_grid_thw": grid, "mm_token_type_ids": (ids == IMAGE).int()}


def make_queries(batch: int) -> dict:
    ids = torch.randint(20, 500, (batch, QUERY_TOKENS))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def measure(cell: dict) -> dict:
    os.environ["COLPALI_SCORES_BACKEND"] = "torch" if cell["path"] == "stock" else "auto"
    from colpali_engine.loss import ColbertLoss

    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with DEVICE:
        model = build_model(cell["kind"]).train()
    torch.set_default_dtype(torch.float32)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if cell["path"] == "fast":
        pylate_fastmaxsim.enable()
    loss_function = ColbertLoss().to(DEVICE)
    optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=2e-4)
    batches = [(make_queries(cell["batch"]), make_pages(cell["kind"], cell["batch"])) for _ in range(2)]

    def loss_of(index: int) -> torch.Tensor:
        inputs = [{key: value.to(DEVICE) for key, value in part.items()} for part in batches[index % len(batches)]]
        with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
            # The trainer passes float32 embeddings to the loss.
            queries, pages = (model(**part).float() for part in inputs)
            return loss_function(queries, pages)

    return measured(loss_of, optimizer, cell)


def cell_name(kind: str, path: str, batch: int) -> str:
    return f"{kind}/{path}/batch={batch}"


def recorded(*_) -> dict:
    return {"colpali-engine": version("colpali-engine")}


def add_options(parser: argparse.ArgumentParser) -> None:
    steps.add_options(parser, PATHS, [16, 64], compiled=False, warmup=2, steps=5)
    parser.add_argument("--kinds", nargs="+", choices=list(TEXT), default=list(TEXT))


def cells(options: argparse.Namespace) -> dict[str, dict]:
    how = {"warmup": options.warmup, "steps": options.steps}
    return {
        cell_name(kind, path, batch): {"kind": kind, "path": path, "batch": batch, **how}
        for kind, batch, path in itertools.product(options.kinds, options.batches, options.paths)
    }


def markdown(content: dict) -> str:
    """Step time and peak memory by model and batch, with the ratio to stock."""
    cells = content["cells"]
    columns = sorted({(cell["kind"], cell["batch"]) for cell in cells.values()})
    titles = {(kind, batch): f"{kind}, batch {batch}" for kind, batch in columns}
    return steps_table(cells, PATHS, titles, lambda path, column: cell_name(column[0], path, column[1]))
