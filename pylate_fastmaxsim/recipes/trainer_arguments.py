"""Arguments of the trainer that stand in a recipe under their own names, checked against the dataclass of its library."""

import typing
from dataclasses import fields, replace
from enum import Enum
from functools import reduce
from operator import or_
from typing import Any

from pylate_fastmaxsim._checks import suggestion
from pylate_fastmaxsim.recipes.config.parse import alternatives, convert
from pylate_fastmaxsim.recipes.config.schema import Recipe
from pylate_fastmaxsim.recipes.errors import RecipeError

# What other trainers and people call them.
OTHER_NAMES = {
    **dict.fromkeys(("batch_size", "train_batch_size", "bs"), "per_device_train_batch_size"),
    **dict.fromkeys(("epochs", "num_epochs", "max_epochs"), "num_train_epochs"),
    **dict.fromkeys(("steps", "num_steps", "train_steps"), "max_steps"),
    **dict.fromkeys(("lr", "max_lr"), "learning_rate"),
    **dict.fromkeys(("scheduler", "lr_scheduler"), "lr_scheduler_type"),
    **dict.fromkeys(("warmup", "num_warmup_steps"), "warmup_steps"),
    **dict.fromkeys(("grad_accum", "accumulation_steps"), "gradient_accumulation_steps"),
    **dict.fromkeys(("grad_clip", "gradient_clip_val"), "max_grad_norm"),
    **dict.fromkeys(("patience", "early_stopping"), "early_stopping_patience"),
    **dict.fromkeys(("amp", "mixed_precision", "dtype"), "precision"),
    "evaluation_strategy": "eval_strategy",
    "num_workers": "dataloader_num_workers",
    "repo_id": "hub_model_id",
}
# Arguments that a recipe does not take, and why.
_EVALUATION = "a recipe is evaluated by search and not by batches of a loss; its keys are those of evaluation"
_RESUMING = "a run that goes on would not be the one that was interrupted"
_COLUMNS = "a recipe chooses the columns of its rows: data.columns"
_LAUNCHER = "accelerate launch says it (docs/recipes.md)"
_PUSHED = "a recipe pushes its model once, when it is evaluated"
REFUSED = {
    "output_dir": "it is a key of the recipe itself",
    **dict.fromkeys(("do_train", "do_eval", "do_predict"), "the command says what is done"),
    "resume_from_checkpoint": "train goes on from the last checkpoint in output_dir; --no-resume starts over",
    **dict.fromkeys(("save_only_model", "ignore_data_skip", "restore_callback_states_from_checkpoint"), _RESUMING),
    **dict.fromkeys(("auto_find_batch_size", "accelerator_config"), _RESUMING),
    "data_seed": "training.seed is that of the order of batches, data.seed that of rows",
    **dict.fromkeys(("train_sampling_strategy", "group_by_length", "length_column_name"), _RESUMING),
    **dict.fromkeys(("remove_unused_columns", "label_names", "router_mapping", "prompts"), _COLUMNS),
    "multi_dataset_batch_sampler": "the rows of data.more are mixed",
    **dict.fromkeys(("fsdp", "fsdp_config", "deepspeed", "parallelism_config", "local_rank"), _LAUNCHER),
    **dict.fromkeys(("prediction_loss_only", "per_device_eval_batch_size", "eval_accumulation_steps"), _EVALUATION),
    **dict.fromkeys(("eval_do_concat_batches", "eval_use_gather_object", "include_for_metrics"), _EVALUATION),
    **dict.fromkeys(("batch_eval_metrics", "bf16_full_eval", "fp16_full_eval"), _EVALUATION),
    "logging_nan_inf_filter": "it would hide a run that diverged",
    **dict.fromkeys(("hub_strategy", "hub_always_push"), _PUSHED),
    "hub_token": "recipes stand in cards; give it by HF_TOKEN or hf auth login",
}
_LIMITS = {"warmup_ratio": {"minimum": 0, "maximum": 1}}
_SIMPLE = {bool: bool, int: int, float: float, str: str, type(None): type(None), list: list[str], dict: dict[str, Any]}


def with_checked_arguments(recipe: Recipe) -> Recipe:
    """The recipe with ``training.arguments`` in the types of the trainer's dataclass; RecipeError if one is not of it."""
    given = recipe.training.arguments
    if not given:
        return recipe
    from pylate_fastmaxsim.recipes.models.load import kind_of  # takes seconds

    types, keys = simple_types(kind_of(recipe.model).arguments_class), [each.name for each in fields(recipe.training)]
    checked = {}
    for name, value in given.items():
        if name in REFUSED:
            raise RecipeError(f"training.{name} is not taken: {REFUSED[name]}.")
        if name not in types:
            known = [*keys, *(each for each in types if each not in REFUSED)]
            hint = suggestion(OTHER_NAMES.get(name, name), known, "")
            if not hint.startswith("did you"):
                hint = "they are in docs/reference.md and in the documentation of transformers.TrainingArguments."
            raise RecipeError(f"training.{name} is neither a key of a recipe nor an argument of the trainer; {hint}")
        hint, one_of_names = types[name]
        # YAML reads the word no as false.
        value = "no" if value is False and one_of_names else value
        checked[name] = convert(value, hint, _LIMITS.get(name, {}), f"training.{name}")
    if {"bf16", "fp16"} & checked.keys() and recipe.training.precision != "auto":
        raise RecipeError("training.precision must be auto where training.bf16 or training.fp16 is given.")
    if checked.get("warmup_ratio") and recipe.training.warmup_steps:
        raise RecipeError("training.warmup_steps must be 0 where training.warmup_ratio is given.")
    return replace(recipe, training=replace(recipe.training, arguments=checked))


def simple_types(arguments: type) -> dict[str, tuple[Any, bool]]:
    """The arguments of a dataclass of them that YAML can say: their types, and whether they are one of some names."""
    hints, found = typing.get_type_hints(arguments), {}
    for each in fields(arguments):
        options = alternatives(hints[each.name])
        kinds = [_SIMPLE[origin] for option in options if (origin := typing.get_origin(option) or option) in _SIMPLE]
        if each.init and kinds:
            found[each.name] = reduce(or_, kinds), any(isinstance(o, type) and issubclass(o, Enum) for o in options)
    return found
