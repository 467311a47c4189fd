"""The folder of a static model: damage is one error, and no kill, power cut or full disk loses the model before."""

from __future__ import annotations

import itertools
import multiprocessing
import random

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from pylate_fastmaxsim import StaticLateInteraction
from tests.support.full_disk import no_file_above
from tests.support.power_cut import states, written

FILES = ("tables-*", "tokenizer-*", "static_late_interaction.json")


def save(folder, seed=0):
    """A model whose vectors, words and description are all of its seed."""
    vectors = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
    tokenizer = Tokenizer(
        WordLevel({f"{word}{seed}": number for number, word in enumerate("abcd")}, unk_token=f"a{seed}")
    )
    StaticLateInteraction(vectors, None, tokenizer, threshold=float(seed), normalize=False).save(folder)


def loaded(folder) -> int:
    """The seed of the model in a folder."""
    model = StaticLateInteraction.load(folder)
    seed = int(model.threshold)
    expected = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(model.query_vectors, expected)
    assert model.tokenizer.token_to_id(f"d{seed}") == 3
    return seed


@pytest.mark.parametrize("pattern", FILES)
def test_a_flipped_bit_or_a_missing_file_is_one_error_that_names_the_file(pattern, tmp_path):
    save(tmp_path)
    (file,), draw = tmp_path.glob(pattern), random.Random(0)
    whole = file.read_bytes()
    for _ in range(100):
        flipped = bytearray(whole)
        flipped[draw.randrange(len(whole))] ^= 1 << draw.randrange(8)
        file.write_bytes(flipped)
        with pytest.raises(ValueError, match=file.name):
            loaded(tmp_path)
    file.unlink()
    with pytest.raises(ValueError, match=file.name):
        loaded(tmp_path)


@pytest.mark.parametrize("before", [False, True])
def test_kills_and_power_cuts_leave_the_old_model_or_the_new_one(before, tmp_path):
    root = written({"model": None}, tmp_path / "root")
    if before:
        save(root / "model")
        save(root / "model", 1)  # files of the one before stay for its readers
    found = states(root, lambda: save(root / "model", 2), cuts=20)
    assert loaded(root / "model") == 2 and len(list((root / "model").glob("tables-*"))) == 1 + before
    for number, (kind, state) in enumerate(found):
        left = written(state, tmp_path / str(number)) / "model"
        if before or kind == "end" or (left / FILES[-1]).exists():
            assert loaded(left) in ((2,) if kind == "end" else (1, 2))
        save(left, 3)
        assert loaded(left) == 3


@pytest.mark.parametrize("share", [0, 0.1, 0.5, 0.99])
def test_a_full_disk_leaves_the_model_before(share, tmp_path):
    save(tmp_path)
    size = int(share * max(path.stat().st_size for path in tmp_path.iterdir()))
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with no_file_above(size), pytest.raises(OSError, match="File too large"):
        save(tmp_path, 1)
    assert {path: path.read_bytes() for path in before} == before and loaded(tmp_path) == 0


def test_readers_beside_a_writer_load_one_model_or_the_other(tmp_path):
    save(tmp_path)
    stop = multiprocessing.get_context("fork").Event()

    def write():
        for seed in itertools.cycle(range(2)):
            if stop.is_set():
                break
            save(tmp_path, seed)

    writer = multiprocessing.get_context("fork").Process(target=write)
    writer.start()
    try:
        seeds = [loaded(tmp_path) for _ in range(300)]
    finally:
        stop.set()
        writer.join()
    assert {0, 1} == set(seeds)
