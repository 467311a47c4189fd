"""The recipe and the training in the card of a saved model."""

from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

from huggingface_hub import metadata_load, metadata_save
from sentence_transformers import SentenceTransformerTrainer
from sentence_transformers.evaluation import SentenceEvaluator
from transformers import TrainerCallback, TrainerState

import pylate_fastmaxsim
from pylate_fastmaxsim.files.replace import replace_file
from pylate_fastmaxsim.recipes.config.schema import Recipe
from pylate_fastmaxsim.recipes.load import plain_values, to_yaml
from pylate_fastmaxsim.recipes.models.load import HostModel, encoder_of, kind_of
from pylate_fastmaxsim.recipes.pooling import final_pooling, pooling_at
from pylate_fastmaxsim.recipes.trainers.sharded import note_metrics

CARD = "README.md"


def append_recipe(folder: Path, recipe: Recipe) -> None:
    """Append recipe and versions to the card that the host library wrote into ``folder``, or to a new one; add tags."""
    kind, file = kind_of(recipe.model), folder / CARD
    if kind.own_card is not None:
        title = f"# {recipe.name}\n\nA model of document pages, trained with {kind.host}"
        file.write_text(f"{title} from `{recipe.model.name_or_path}`.\n", encoding="utf-8")
    metadata = (metadata_load(file) or {}) | (kind.own_card or {})
    if kind.own_card is not None and not Path(recipe.model.name_or_path).is_dir():
        metadata["base_model"] = recipe.model.name_or_path
    tags = dict.fromkeys([*(metadata.get("tags") or []), "pylate-fastmaxsim"])
    metadata_save(file, metadata | {"tags": list(tags)})
    given = to_yaml(plain_values(recipe, only_set=True))
    with open(file, "a", encoding="utf-8") as card:
        card.write(
            f"\n## Training recipe\n\nTrained with the recipe `{recipe.name}` of pylate-fastmaxsim "
            f"{pylate_fastmaxsim.__version__} ({kind.host} {version(kind.host.replace(' ', '-'))}); keys that are not given "
            f"have their defaults:\n\n```yaml\n{given}```\n"
        )
        if (pooling := recipe.loss.pooling) is not None:
            used = end = final_pooling(pooling)
            if pooling.schedule is not None:
                used = f"{pooling_at(pooling, 0, 2)} to {end} ({pooling.schedule} over the training)"
            card.write(
                f"\nPooling of the similarities, where MaxSim takes the maximum: {used}. To score like this: "
                f"`pylate_fastmaxsim.enable(pooling={end})`.\n"
            )


class ExactSearchEvaluator(SentenceEvaluator):
    """The source of the metrics of a recipe's evaluation, which the card calls Exact Search."""


def add_metrics(
    recipe: Recipe, model: HostModel, metrics: dict[str, float | None], folder: Path, state: TrainerState
) -> None:
    """Add the metrics of the evaluation to the card of a saved model; its weights on disk stay as they are."""
    if metrics := {name: value for name, value in metrics.items() if value is not None}:
        evaluator, section = ExactSearchEvaluator(), recipe.evaluation
        evaluator.name = section.beir or ("NanoBEIR" if section.nano_beir else "held-out")
        evaluator.primary_metric = "ndcg@10"
        model.model_card_data.set_evaluation_metrics(evaluator, metrics, state.epoch, state.global_step)
    with TemporaryDirectory() as scratch:
        model._create_model_card(scratch)
        append_recipe(Path(scratch), recipe)
        replace_file(folder / CARD, Path(scratch, CARD).read_bytes())


def restore_card_metadata(trainer: SentenceTransformerTrainer, state: TrainerState, begun: HostModel) -> None:
    """Restore what a finished training had written into the card of its model, for a model loaded from a checkpoint.

    Without a training in this process, Sentence Transformers would copy the card of the checkpoint.

    Parameters
    ----------
    trainer
        A trainer of the loaded model.
    state
        The final state of the training.
    begun
        The model that the training began with; the card names it as base model.
    """
    data = trainer.model.model_card_data
    data.base_model, data.base_model_revision = (
        begun.model_card_data.base_model,
        begun.model_card_data.base_model_revision,
    )
    # Sentence Transformers looks the base model up on the Hub by this name.
    encoder_of(trainer.model).config.name_or_path = encoder_of(begun).config.name_or_path
    replayed = TrainerState()
    for callback in trainer.callback_handler.callbacks:
        # Each trainer of Sentence Transformers has one of its own, of no common class in all releases.
        if not type(callback).__name__.endswith("ModelCardCallback"):
            continue
        callback.on_train_begin(trainer.args, replayed, trainer.control, model=trainer.model)
        for entry in state.log_history:
            replayed.global_step, replayed.epoch = entry["step"], entry.get("epoch")
            callback.on_log(trainer.args, replayed, trainer.control, model=trainer.model, logs=entry)
            if "eval_ndcg@10" in entry:
                callback.on_evaluate(trainer.args, replayed, trainer.control, model=trainer.model, metrics=entry)
                note_metrics(trainer.model, entry)
    if trainer.args.load_best_model_at_end:
        data.set_best_model_step(state.best_global_step)


class NameRecipe(TrainerCallback):
    """Adds the recipe to the card of every checkpoint, since each can be used as a model."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe

    def on_save(self, args, state, control, **kwargs) -> None:
        if state.is_world_process_zero:
            # In place: the trainer has just written the checkpoint, and goes on from it with any card.
            append_recipe(Path(args.output_dir) / f"checkpoint-{state.global_step}", self.recipe)
