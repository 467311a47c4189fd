"""The trained model on the Hugging Face Hub: ``training.push_to_hub``."""

from pathlib import Path

from huggingface_hub import HfApi

from pylate_fastmaxsim.recipes.config.schema import Recipe
from pylate_fastmaxsim.recipes.errors import as_recipe_error


def open_repository(recipe: Recipe) -> str | None:
    """The name of the repository that is pushed to, made if need be; None without ``training.push_to_hub``.

    Raises
    ------
    RecipeError
        The Hub cannot be reached, or refuses the token. So that it is known before the training.
    """
    own = recipe.training.arguments
    if not own.get("push_to_hub"):
        return None
    name, api = own.get("hub_model_id") or Path(recipe.output_dir).absolute().name, HfApi()
    with as_recipe_error(f"training.push_to_hub: {name} cannot be made on the Hub", (Exception,)):
        repository = api.create_repo(name, private=own.get("hub_private_repo"), exist_ok=True).repo_id
        if own.get("hub_revision") is not None:
            api.create_branch(repository, branch=own["hub_revision"], exist_ok=True)
    return repository


def push(recipe: Recipe, repository: str, folder: Path) -> str:
    """Push the model in a folder, and return the address of the commit."""
    where = f"training.push_to_hub: the model is in {folder}, but {repository} cannot be written"
    with as_recipe_error(where, (Exception,)):
        done = HfApi().upload_folder(
            repo_id=repository,
            folder_path=folder,
            commit_message=f"Train with the recipe {recipe.name} of pylate-fastmaxsim",
            revision=recipe.training.arguments.get("hub_revision"),
        )
    return str(done.commit_url)
