"""The folder of a static model: damage is one error, and saving never loses the model before."""

from __future__ import annotations

import random

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from pylate_fastmaxsim import StaticLateInteraction
from pylate_fastmaxsim.retrieval.static import files


def saved(folder, seed=0):
    vectors = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
    tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate("abcd")}, unk_token="a"))
    StaticLateInteraction(vectors, None, tokenizer, threshold="lowest").save(folder)
    return StaticLateInteraction.load(folder).query_vectors


def test_a_flipped_bit_or_a_missing_file_is_one_error_that_names_the_file(tmp_path):
    saved(tmp_path)
    draw = random.Random(0)
    for file in (path for path in list(tmp_path.iterdir()) if path.name != "lock"):
        whole = file.read_bytes()
        for _ in range(40):
            flipped = bytearray(whole)
            flipped[draw.randrange(len(whole))] ^= 1 << draw.randrange(8)
            file.write_bytes(flipped)
            with pytest.raises(ValueError, match=file.name):
                StaticLateInteraction.load(tmp_path)
        file.unlink()
        with pytest.raises(ValueError, match=file.name):
            StaticLateInteraction.load(tmp_path)
        file.write_bytes(whole)


@pytest.mark.parametrize("step", range(3))
def test_saving_that_fails_leaves_the_model_before(step, tmp_path, monkeypatch):
    before = saved(tmp_path)
    left = iter(range(3))

    def full(write):
        def failing(*arguments):
            if next(left) == step:
                raise OSError("No space left on device")
            write(*arguments)

        return failing

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space"):
        patch.setattr(files, "replace_file", full(files.replace_file))
        patch.setattr(files, "write_record", full(files.write_record))
        saved(tmp_path, seed=1)
    assert torch.equal(StaticLateInteraction.load(tmp_path).query_vectors, before)
    for seed in (1, 2, 3):  # those of the model before stay, older ones go
        assert not torch.equal(saved(tmp_path, seed), before)
    assert len(list(tmp_path.glob("tables-*"))) == 2
