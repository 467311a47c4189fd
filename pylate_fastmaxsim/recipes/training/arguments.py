"""The trainer's arguments for a recipe, on a machine that can train with them."""

from dataclasses import asdict
from typing import Any

import torch
import transformers
from sentence_transformers import SentenceTransformerTrainingArguments
from transformers import Trainer, get_scheduler
from transformers.integrations import (
    get_available_reporting_integrations,
    is_tensorboard_available,
    is_wandb_available,
)
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from pylate_fastmaxsim._checks import suggestion
from pylate_fastmaxsim.recipes.config.schema import LossSection, Recipe
from pylate_fastmaxsim.recipes.errors import RecipeError, as_recipe_error
from pylate_fastmaxsim.recipes.kind import Kind

# Of a Trainer that only takes steps, and leaves nothing behind.
ONLY_STEPS = {
    **dict.fromkeys(("save_strategy", "logging_strategy", "eval_strategy"), "no"),
    "report_to": [],
    "eval_on_start": False,
    "load_best_model_at_end": False,
}
BEST_METRIC = "ndcg@10"
LOWER_IS_BETTER = ("kl_divergence", "flops", "query_nonzeros", "document_nonzeros")
REPORTERS = {"tensorboard": is_tensorboard_available, "wandb": is_wandb_available}


def training_arguments(recipe: Recipe, kind: Kind, **overrides: Any) -> SentenceTransformerTrainingArguments:
    """The trainer's arguments for a recipe of a kind; ``overrides`` are arguments under the trainer's own names."""
    options = asdict(recipe.training)
    own = options.pop("arguments")
    for name in ("precision", "log_gradient_concentration", "early_stopping_patience"):
        options.pop(name, None)
    # What train does itself: the final model is pushed, and the untrained one evaluated once.
    done_here = [name for name in own if name in ("push_to_hub", "eval_on_start") or name.startswith("hub_")]
    query_rate = options.pop("query_learning_rate", None)
    if "warmup_ratio" in own and int(transformers.__version__.partition(".")[0]) >= 5:
        options["warmup_steps"] = own.pop("warmup_ratio")  # its name from transformers 5 on
    if query_rate is not None:
        own["learning_rate_mapping"] = {
            **(own.get("learning_rate_mapping") or {}),
            r"\.sub_modules\.query\.": query_rate,
        }
    if not options["gradient_checkpointing"]:
        del options["gradient_checkpointing"]  # later releases of transformers warn of the name
    if recipe.data.streaming:
        # Otherwise one process would read for all, and cut columns of several documents a row to the number of rows.
        options["accelerator_config"] = {"dispatch_batches": False}
    save_steps = options.pop("save_steps")
    on_gpu = torch.cuda.is_available() and not recipe.training.use_cpu
    wanted = recipe.training.precision
    if {"bf16", "fp16"} & own.keys():
        wanted = next((name for name in ("bf16", "fp16") if own.get(name)), "fp32")
    precision = _precision(wanted, recipe.model.dtype, on_gpu)
    if options["report_to"] == "auto":
        options["report_to"] = [name for name, is_available in REPORTERS.items() if is_available()]
    options |= {
        **kind.arguments,
        "output_dir": recipe.output_dir,
        "run_name": recipe.name,
        "max_steps": recipe.training.max_steps or -1,
        "bf16": precision == "bf16",
        "fp16": precision == "fp16",
        "save_strategy": "no" if save_steps is None else "steps",
        "save_steps": save_steps or 500,
        "logging_first_step": True,
        # The filter hides a diverged run and waits for the device in every step.
        "logging_nan_inf_filter": False,
        "dataloader_pin_memory": on_gpu,
        "disable_tqdm": False,
        "metric_for_best_model": BEST_METRIC if recipe.training.needs_best else None,
        "greater_is_better": own.get("metric_for_best_model", BEST_METRIC).removeprefix("eval_") not in LOWER_IS_BETTER,
        **{name: value for name, value in own.items() if name not in done_here},
        **overrides,
    }
    with as_recipe_error("training"):  # an unknown scheduler or optimizer, a device without this precision
        arguments = kind.arguments_class(**options)
    if arguments.n_gpu > 1:
        # Several GPUs need `accelerate launch`; the trainer would use DataParallel.
        arguments._n_gpu = 1
    if arguments.device.type == "cpu" and arguments.device.index is not None:
        # With several processes accelerate says cpu:0, which torch.load does not know when it resumes.
        arguments._setup_devices = torch.device("cpu")
    _require_installed(arguments)
    _require_one_backward(recipe.loss, arguments)
    return arguments


def _precision(wanted: str, dtype: str, on_gpu: bool) -> str:
    if not on_gpu:
        return "fp32" if wanted == "auto" else wanted
    has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)  # emulated, it is slower than fp16
    for key, needs_bf16, allowed in (
        ("model.dtype", dtype == "bfloat16", "auto or float32"),
        ("training.precision", wanted == "bf16", "auto, fp16 or fp32"),
    ):
        if needs_bf16 and not has_bf16:
            raise RecipeError(
                f"{key} must be {allowed} here, because the GPU ({torch.cuda.get_device_name()}) has no bf16."
            )
    return ("bf16" if has_bf16 else "fp16") if wanted == "auto" else wanted


def _require_installed(arguments: SentenceTransformerTrainingArguments) -> None:
    """Refuse early what the trainer would refuse after loading data and model."""
    available = get_available_reporting_integrations()
    for name in arguments.report_to:
        if name not in INTEGRATION_TO_CALLBACK:
            hint = suggestion(name, ["auto", "none", "all", *INTEGRATION_TO_CALLBACK], "it may be")
            raise RecipeError(f"training.report_to {name} is not known to transformers; {hint}")
        if name not in available:
            raise RecipeError(f"training.report_to must be auto or none here, because {name} is not installed.")
    optimizer, scheduler = arguments.optim.value, arguments.lr_scheduler_type.value
    with as_recipe_error(f"training.optim {optimizer} cannot be used here", (ImportError, ValueError)):
        Trainer.get_optimizer_cls_and_kwargs(arguments, torch.nn.Identity())
    weights = torch.optim.SGD([torch.zeros(1)], lr=arguments.learning_rate)
    with as_recipe_error(f"training.lr_scheduler_type {scheduler} cannot be used here", (TypeError, ValueError)):
        get_scheduler(scheduler, weights, arguments.get_warmup_steps(1), num_training_steps=1)


def _require_one_backward(loss: LossSection, arguments: SentenceTransformerTrainingArguments) -> None:
    """Refuse a loss with several backwards a step under ZeRO 2 and 3, which would fail in the first step."""
    plugin = arguments.deepspeed_plugin
    if plugin is None or plugin.zero_stage < 2:
        return
    here = f"under DeepSpeed's ZeRO {plugin.zero_stage}, which allows one backward a step"
    if loss.name == "cached_contrastive":
        raise RecipeError(f"loss.name must not be cached_contrastive {here}; use ZeRO 1 or another loss.")
    if loss.mini_batch_size is not None:
        raise RecipeError(f"loss.mini_batch_size must be null {here}.")
