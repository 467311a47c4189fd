import json

import pytest
import torch
from sentence_transformers import SparseEncoder

from pylate_fastmaxsim.diagnostics.injection import ATTACKS
from pylate_fastmaxsim.recipes.data.collection import load_collection
from pylate_fastmaxsim.recipes.evaluation.ranking import evaluate_collection
from pylate_fastmaxsim.recipes.load import dump_recipe
from pylate_fastmaxsim.recipes.models.load import load_model, load_retriever
from pylate_fastmaxsim.recipes.models.retriever import retriever_of
from pylate_fastmaxsim.recipes.robustness.measure import measure
from pylate_fastmaxsim.recipes.robustness.task import Settings, collection_task
from pylate_fastmaxsim.recipes.training.train import train
from tests.support.beir_folder import write_folder
from tests.support.command_line import fastmaxsim
from tests.support.page_recipes import PAGES
from tests.support.recipe_kinds import LATE as HOST
from tests.support.saved_models import LATE, SPARSE, STATIC, save_retriever


@pytest.mark.parametrize(("kind", "tokens", "times"), [(LATE, 12, 4), (SPARSE, 40, 20), (STATIC, None, 20)])
def test_longer_documents_are_ranked_as_everywhere_else(kind, tokens, times, encoder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    data, late = str(write_folder(tmp_path / "data")), kind == LATE
    folder = save_retriever(kind, tmp_path / "model", encoder("bert"), **({"document_length": tokens} if late else {}))
    if kind == SPARSE:
        model = SparseEncoder(folder)
        model.max_seq_length = tokens
        model.save_pretrained(folder)
    arguments = ["robustness", folder, "--beir", data, "--times", f"1,{times}", "--tokens", "0,5"]
    done = fastmaxsim([*arguments, "--pooling", "max"], code=0)
    result = json.loads((tmp_path / "robustness.json").read_text())
    assert (f"Nothing is injected: a {kind} model has" in " ".join(done.stdout.split())) == (not late)
    assert len(result["injection"]) == (2 * len(ATTACKS) if late else 0)
    assert (result["kind"], result["appended"], result["document_length"]) == (kind, "text", tokens)
    assert (result["recipe"], result["data"], result["documents"]) == (None, data, 150)
    # What the encoder has positions for; a static model has no limit.
    assert result["lengthened_document_length"] == {12: 64, 40: 512, None: None}[tokens]
    own, longer = result["lengths"]
    assert own["pooling"] == "max" and longer["tokens"] > own["tokens"] > 1 and own["cut"] == 0
    assert late or (longer["cut"] > 0) == (tokens is not None)
    assert 0 < own["ndcg@10"] < 1 and own["ndcg@10"] != longer["ndcg@10"]
    retriever, collection = retriever_of(load_retriever(folder, "cpu")), load_collection(data)
    assert own["ndcg@10"] == pytest.approx(evaluate_collection(retriever, collection, 8)["ndcg@10"], abs=1e-6)
    if late:
        assert own["tokens"] <= 12 and longer["tokens"] > 2 * own["tokens"]
        _, pairs = measure(retriever, collection_task("data", collection, Settings()), Settings(tokens=[5]), 8)
        assert all(len(pair.query_tokens) == len(pair.similarities) for pair in pairs)
        assert retriever.document_length == 12  # as before
        return
    for option, said in (
        ("--pooling=softmax=0.1", "--pooling must be max for a sparse or static model"),
        ("--append=tokens", f"--append tokens needs a model of token embeddings, and this one is {kind}; use"),
    ):
        done = fastmaxsim([*arguments, option])
        assert done.exit_code == 2 and done.stderr.splitlines()[-1].startswith(f"fastmaxsim: {said}")


# A recipe of a ColBERT is measured in test_robustness_command.py.
@pytest.mark.e2e
@pytest.mark.parametrize("kind", [*PAGES, *({HOST} - {"colbert"})])
def test_the_model_of_a_recipe_is_measured_on_its_held_out_rows(kind, recipe_of, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    loaded, file = recipe_of(kind), tmp_path / "recipe.yaml"
    train(loaded)
    file.write_text(dump_recipe(loaded))
    arguments = ["robustness", str(file), "--pooling", "top_k=2", "--times", "3", "--tokens", "9"]
    fastmaxsim(arguments, code=0)
    result = json.loads((tmp_path / "out" / "robustness.json").read_text())
    assert (result["appended"], result["of_pages"]) == (("tokens", True) if kind in PAGES else ("text", False))
    assert result["poolings"] == ["max", "top_k=2"] and [row["times"] for row in result["lengths"]] == [1, 1, 3, 3]
    assert [row["tokens"] for row in result["injection"][:4]] == [0, 0, 9, 9]
    evaluated = json.loads((tmp_path / "out" / "train.json").read_text())["ndcg@10"]
    assert result["lengths"][0]["ndcg@10"] == pytest.approx(evaluated, abs=1e-6)
    if kind in PAGES:
        assert (tmp_path / "out" / "robustness.html").read_text().count("data:image/svg+xml;base64,") == 4
        done = fastmaxsim([*arguments, "--append", "text"])
        assert "--append text needs a model of texts, and this one is of pages" in done.stderr


@pytest.mark.parametrize("kind", PAGES)
def test_patches_of_a_page_are_where_colpali_engine_has_them(kind, recipe_of):
    from tests.support.visual_models import page

    retriever = retriever_of(load_model(recipe_of(kind).model, "cpu", 0))
    assert len(retriever.query_token_ids("a b c")) == len(retriever.encode(["a b c"], 4, is_query=True).values)
    processor, pages = retriever.model.processor, [page(number) for number in range(3)]
    documents = retriever.encode(pages, 2, is_query=False)
    for image, vectors in zip(pages, documents.values.split(documents.lengths.tolist()), strict=True):
        mask = processor.get_image_mask(processor.process_images([image]))
        columns, rows = processor.get_n_patches(image.size, {"colqwen2": 2, "colpali": 14}[kind])
        # As its get_similarity_maps_from_embeddings takes them.
        assert torch.equal(vectors[retriever.patches(image)], vectors[mask[0]].view(rows, columns, -1))
