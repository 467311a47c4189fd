from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

# Of these kinds of model, in tests that need nothing of PyLate.
WITHOUT_PYLATE = (
    *("multi_vector", "kinds", "splade_losses", "refused_rows", "ranking", "held_out", "mined", "load_model"),
    *("search_command", "evaluate_command", "evaluated_training"),
)

# Recipes need the extra "recipes".
try:
    for module in ("datasets", "matplotlib", "ranx", "rich"):
        import_module(module)
except ImportError:
    collect_ignore_glob = ["*"]
try:
    import_module("pylate")
except ImportError:  # Sentence Transformers 6 excludes it
    files = Path(__file__).parent.rglob("test_*.py")
    collect_ignore = [str(file) for file in files if not any(kind in file.name for kind in WITHOUT_PYLATE)]


@pytest.fixture(scope="session")
def saved(encoder, tmp_path_factory) -> Callable[[str], str]:
    """``saved(kind)``: the folder of a tiny model of a kind, with the tokenizer of the tiny BERT, saved once per session."""
    from tests.support.saved_models import save_retriever

    return cache(
        lambda kind: save_retriever(kind, tmp_path_factory.mktemp("saved") / kind.replace(" ", "-"), encoder("bert"))
    )


@pytest.fixture(scope="session")
def teacher(tmp_path_factory, encoder) -> str:
    """A cross-encoder with random weights."""
    import torch
    from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

    folder = str(tmp_path_factory.mktemp("teacher"))
    tokenizer = AutoTokenizer.from_pretrained(encoder("bert"))
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = BertConfig(vocab_size=len(tokenizer), num_labels=1, **sizes)
    BertForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def page_data(tmp_path_factory):
    """A data set of pages, and ``model(kind)``: the folder of a tiny model, built once."""
    from tests.support.page_recipes import write_pages
    from tests.support.visual_models import build_visual_model

    model = cache(lambda kind: build_visual_model(tmp_path_factory.mktemp(kind), kind))
    return write_pages(tmp_path_factory.mktemp("pages")), model


@pytest.fixture
def recipe_of(request, tmp_path):
    """``recipe_of(kind, overrides, output, rows=None)``: a tiny recipe of a kind of model; overrides are written in a row."""
    from pylate_fastmaxsim.recipes.load import load_recipe
    from tests.support.page_recipes import PAGES, page_overrides
    from tests.support.paths import RECIPES
    from tests.support.recipe_kinds import tiny_of
    from tests.support.tiny_recipe import split_overrides, write

    def make(kind: str, overrides: str = "", output: str = "out", rows: list[dict] | None = None):
        if kind not in PAGES:
            inputs = tmp_path if rows is None else tmp_path / "inputs" / output
            inputs.mkdir(parents=True, exist_ok=True)
            made = tiny_of(kind, inputs, rows=rows) | {"output_dir": str(tmp_path / output)}
            return load_recipe(write(tmp_path, made, kind), split_overrides(overrides))
        pages, model = request.getfixturevalue("page_data")
        given = page_overrides(kind, model(kind), pages, tmp_path / output)
        return load_recipe(RECIPES / f"{PAGES[kind]}.yaml", [*given, *split_overrides(overrides)])

    return make
