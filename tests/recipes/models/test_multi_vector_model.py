import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from sentence_transformers import MultiVectorEncoder, SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, Pooling, Transformer

from pylate_fastmaxsim.recipes.config.kinds import MultiVectorSection
from pylate_fastmaxsim.recipes.models.load import load_model
from tests.support.models import sentences

FIXED = {"strategy": "fixed", "attend": False, "token": None, "length": 32}


def load(path: str | Path, **section: object) -> MultiVectorEncoder:
    return load_model(MultiVectorSection(name_or_path=str(path), **section), "cpu", seed=0)


@pytest.mark.parametrize(
    ("section", "expansion", "query_length"),
    [
        ({}, None, None),
        ({"query_length": 20}, None, 20),
        ({"do_query_expansion": True}, FIXED, None),
        ({"do_query_expansion": True, "query_length": 9}, {**FIXED, "length": 9}, None),
        ({"do_query_expansion": True, "attend_to_expansion_tokens": True}, {**FIXED, "attend": True}, None),
        ({"do_query_expansion": False, "query_length": 9}, None, 9),
    ],
)
def test_a_checkpoint_keeps_lengths_and_expansion_of_a_section(section, expansion, query_length, encoder, tmp_path):
    model = load(encoder("bert"), document_length=24, embedding_size=16, **section)
    model.save_pretrained(str(tmp_path))
    for each in (model, load(tmp_path)):
        assert (each[0].query_expansion, each[0].query_length, each[0].document_length) == (expansion, query_length, 24)
        queries, documents = each.encode_query(["one two"]), each.encode_document([" ".join(["word"] * 40)])
        assert len(queries[0]) == (expansion["length"] if expansion else len(queries[0]))
        assert len(documents[0]) == 24 and documents[0].shape[1] == 16
    if expansion:
        assert load(tmp_path, query_length=7)[0].query_expansion == {**expansion, "length": 7}
        assert load(tmp_path, do_query_expansion=False)[0].query_expansion is None


def test_a_projection_is_drawn_from_the_seed_unless_there_is_one(encoder, tmp_path):
    model = load(encoder("bert"), embedding_size=16)
    model.save_pretrained(str(tmp_path / "saved"))
    width = (transformer := Transformer(encoder("bert"))).get_embedding_dimension()
    dense = SentenceTransformer(modules=[transformer, Pooling(width), Dense(width, 16)], device="cpu")
    dense.save_pretrained(str(tmp_path / "dense"))
    for name, expected in ((encoder("bert"), model[1]), (tmp_path / "saved", model[1]), (tmp_path / "dense", dense[2])):
        weight = load(name, embedding_size=16)[1].linear.weight
        assert weight.shape[0] == 16 and torch.equal(weight, expected.linear.weight)


def test_an_encoder_that_was_downloaded_is_loaded_without_a_network(encoder, tmp_path, monkeypatch):
    cache = tmp_path / "models--some--encoder"
    shutil.copytree(encoder("bert"), cache / "snapshots" / "0")
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("0")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert load("some/encoder", embedding_size=16)[1].out_features == 16


SAVE_AND_SCORE = """
import sys
import torch
from tests.support.models import load_model, sentences
folder, encoder = sys.argv[1:]
for name, options in {"plain": {"do_query_expansion": False}, "expanded": {}, "attended": {"attend_to_expansion_tokens": True}}.items():
    model = load_model(encoder, **options).eval()
    model.save_pretrained(f"{folder}/{name}")
    queries = model.encode(sentences(6, 6, 1), is_query=True, convert_to_tensor=True)
    documents = model.encode(sentences(6, 20, 2), is_query=False, convert_to_tensor=True)
    scores = [[(query @ document.T).amax(1).sum() for document in documents] for query in queries]
    torch.save(torch.tensor(scores), f"{folder}/{name}.pt")
"""


@pytest.mark.process
def test_a_colbert_of_pylate_scores_the_same(encoder, tmp_path):
    # Before this release of Sentence Transformers in PYTHONPATH stands the one that PyLate needs.
    own = str(Path(sys.modules["sentence_transformers"].__file__).parents[1])
    places = [place for place in sys.path if place and os.path.abspath(place) != own]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(places)}
    python = [sys.executable, "-c"]
    if subprocess.run([*python, "import pylate"], env=environment, capture_output=True).returncode:
        pytest.skip("PyLate is not installed below this release of Sentence Transformers")
    subprocess.run([*python, SAVE_AND_SCORE, str(tmp_path), encoder("bert")], env=environment, check=True)
    for name in ("plain", "expanded", "attended"):
        model = load(tmp_path / name)
        assert type(model) is MultiVectorEncoder and (model[0].query_expansion is None) == (name == "plain")
        scores = model.similarity(model.encode_query(sentences(6, 6, 1)), model.encode_document(sentences(6, 20, 2)))
        torch.testing.assert_close(scores, torch.load(tmp_path / f"{name}.pt"), atol=1e-5, rtol=1e-5)
