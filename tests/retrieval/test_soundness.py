"""Folders that are checked, and repaired."""

from __future__ import annotations

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from pylate_fastmaxsim import SparseIndex, StaticLateInteraction, TokenBatch
from pylate_fastmaxsim.kernels.sparse import postings
from pylate_fastmaxsim.retrieval.corpus import Corpus, write_corpus
from pylate_fastmaxsim.retrieval.soundness import check_folder
from tests.support.sparse_vectors import sparse_vectors


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An index, a corpus and a model, each in a folder of its own."""
    monkeypatch.setattr(postings, "DOCUMENTS_PER_BLOCK", 8)
    SparseIndex.build([sparse_vectors(20, 30, seed=0)], folder=tmp_path / "sparse")
    write_corpus(tmp_path / "documents", [TokenBatch.from_list([torch.randn(300, 64) for _ in range(6)])])
    tokenizer = Tokenizer(WordLevel({"a": 0}))
    StaticLateInteraction(torch.eye(3), tokenizer=tokenizer, threshold=0.5).save(tmp_path / "static")
    return tmp_path


FOUND = {
    "documents": ("token embeddings (bfloat16)", 6),
    "sparse": ("a sparse index", 20),
    "static": ("a static model", None),
}


def damage(folder, name: str, place: int) -> str:
    file = next(folder.rglob(name))
    content = bytearray(file.read_bytes())
    content[place] ^= 4
    file.write_bytes(content)
    return str(file)


def test_all_that_a_folder_holds_is_said(folder):
    found = check_folder(folder)
    assert {each.folder.name: (each.what, each.documents) for each in found} == FOUND
    assert not any(each.damage for each in found)
    (folder / "empty").mkdir()
    for other, sentence in (("empty", "holds no sparse index, token embeddings or static model"), ("no", "no folder")):
        with pytest.raises(ValueError, match=sentence):
            check_folder(folder / other)


def test_what_is_damaged_is_named_and_cut_off(folder):
    files = [
        damage(folder, "values.bin", 140_000),
        damage(folder, "block-00000001-*", 250),
        damage(folder, "tables-*", -1),
    ]
    for each, file in zip(check_folder(folder), files, strict=True):
        assert each.damage.startswith(file) and not each.repaired
    repaired = check_folder(folder, repair=True)
    assert [(each.documents, each.repaired) for each in repaired] == [(3, True), (8, True), (None, False)]
    assert [each.damage is None for each in check_folder(folder)] == [True, True, False]
    assert len(Corpus(folder / "documents")) == 3 and len(SparseIndex.load(folder / "sparse")) == 8


def test_what_has_been_begun_is_no_damage(folder):
    def interrupted(held: int):
        yield sparse_vectors(20, 30, seed=0)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        SparseIndex.build(interrupted, folder=folder / "begun" / "sparse")
    [found] = check_folder(folder / "begun")
    assert found.what.startswith("what a call has begun to write") and found.damage is None
