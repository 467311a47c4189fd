"""Damage to the files of each kind of folder: an error that names the file or the same results, never others."""

import os
import random
import shutil
from pathlib import Path

import pytest

from pylate_fastmaxsim import TokenBatch
from pylate_fastmaxsim.files.record import read_record, write_record
from pylate_fastmaxsim.retrieval.corpus import Corpus, write_corpus
from pylate_fastmaxsim.retrieval.formats import checksums
from pylate_fastmaxsim.retrieval.search import search
from pylate_fastmaxsim.retrieval.soundness import check_folder, repair_corpus
from tests.support.corpora import FORMATS, codec, unit_documents, vectors
from tests.support.stored import BEFORE, COUNT, KINDS, MAKERS, Corpora, Kind, files, shrink

QUERIES, WHOLE = TokenBatch.from_list(unit_documents(4, seed=1)[-2:]), [KINDS["bfloat16"].batch(0, COUNT)]
FLIPS = 15  # of each file


@pytest.fixture(autouse=True)
def small(monkeypatch):
    shrink(monkeypatch)
    monkeypatch.setattr(checksums, "CHUNK", 32)


@pytest.fixture(params=KINDS)
def kind(request, tmp_path) -> Kind:
    KINDS[request.param].write(tmp_path / "whole")
    return KINDS[request.param]


def data_files(folder: Path) -> list[Path]:
    """Files that hold other bytes where there are other documents."""
    described = ("checksums-", "codec.", "index.json", "static_", "corpus.json")
    return [file for file in files(folder) if not file.name.startswith(described)]


# A corpus compares what it reads with checksums, so that each way to read is one to find damage.
READINGS = {
    "some": lambda corpus: vectors(corpus.batches(begin=5, end=9)),
    "select": lambda corpus: vectors([corpus.select([17, 3, 3])]),
    "search": lambda corpus: [each.tolist() for each in search(QUERIES, corpus, 5)],
    "rescore": lambda corpus: search(QUERIES, WHOLE, 2, rescore=corpus, candidates_per_result=2).scores.tolist(),
    "sizes": lambda corpus: [len(corpus), corpus.tokens, corpus.dim, corpus.format],
}


def results(kind: Kind, folder: Path, file: Path) -> dict[str, object]:
    """What each reading gives; None where it is refused, in one sentence that names the file."""
    readings = {"all": kind.held}
    if isinstance(kind, Corpora):
        readings |= {name: lambda folder, read=read: read(Corpus(folder)) for name, read in READINGS.items()}
    found = {}
    for name, reading in readings.items():
        try:
            found[name] = reading(folder)
        except ValueError as error:
            assert str(file) in str(error) and "\n" not in str(error)
            found[name] = None
    return found


def flipped(content: bytes, numbers: random.Random) -> bytes:
    damaged = bytearray(content)
    damaged[numbers.randrange(len(content))] ^= 1 << numbers.randrange(8)
    return bytes(damaged)


def test_a_flipped_bit_changes_no_result(kind, tmp_path):
    folder, refused = tmp_path / "whole", 0
    expected = results(kind, folder, folder)
    assert None not in expected.values()
    for file in files(folder):
        numbers, content = random.Random(file.name[:9]), file.read_bytes()
        for _ in range(FLIPS):
            file.write_bytes(flipped(content, numbers))
            found = results(kind, folder, file)
            assert all(each in (None, expected[name]) for name, each in found.items())
            refused += found["all"] is None
        file.write_bytes(content)
    # safetensors says more than is needed to read it.
    assert refused > FLIPS * len(files(folder)) * (0.3 if "sparse" in str(kind.open) else 0.7)


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind.goes_on])
def test_a_flipped_bit_of_what_is_unfinished_changes_no_result(name, tmp_path):
    kind, numbers = KINDS[name], random.Random(0)
    with pytest.raises(KeyboardInterrupt):
        kind.write(tmp_path / "begun", fail_at=COUNT - 8)
    for file in files(tmp_path / "begun"):
        for trial in range(FLIPS // 3 + 1):
            folder = shutil.copytree(tmp_path / "begun", tmp_path / f"{file.name[:14]}-{trial}")
            content = file.read_bytes()
            (folder / file.name).write_bytes(flipped(content, numbers) if trial else content[:-1])
            try:
                kind.write(folder)
            except ValueError as error:
                assert str(folder / file.name) in str(error) and "\n" not in str(error)
            else:
                assert results(kind, folder, folder / file.name)["all"] in (None, COUNT)


def sentence(kind: Kind, file: Path, left: int | None) -> str:
    """What is said of a file of which so many bytes are left; None: it is not there."""
    if file.suffix == ".json" and not file.name.startswith("tokenizer-"):
        return "holds no .*, since it has no" if left is None else f"{file} is damaged, or of another release"
    if isinstance(kind, Corpora):
        shorter = f"must have at least {file.stat().st_size} bytes, but has {left}; put it back, or"
        return f"{file} is missing" if left is None else shorter if file in data_files(file.parent) else str(file)
    if not kind.adds:
        return f"{file} is missing or damaged; save the model again"
    return rf"{file} is missing; build" if left is None else rf"{file} is truncated or damaged \(.*\); build the index"


def test_files_that_are_short_or_missing_are_named(kind, tmp_path):
    folder = tmp_path / "whole"
    for file in files(folder):
        content = file.read_bytes()
        for left in (0, 7, len(content) // 2, len(content) - 2, None):
            said = sentence(kind, file, left)
            os.remove(file) if left is None else os.truncate(file, left)
            with pytest.raises(ValueError, match=said):
                kind.checked(kind.open(folder))
            if kind.adds and left:
                with pytest.raises(ValueError, match=str(file)):
                    kind.write(folder)
            file.write_bytes(content)
    assert kind.held(folder) == COUNT


@pytest.mark.parametrize("name", KINDS)
def test_files_of_another_folder_are_refused(name, tmp_path):
    folder, other = tmp_path / "whole", tmp_path / "other"
    KINDS[name].write(folder)
    MAKERS[name](backwards=True).write(other)
    for file, their in zip(data_files(folder), data_files(other), strict=True):
        content = file.read_bytes()
        file.write_bytes(their.read_bytes())
        assert content != file.read_bytes()
        with pytest.raises(ValueError, match=f"{file} is (missing or )?damaged"):
            KINDS[name].checked(KINDS[name].open(folder))
        file.write_bytes(content)
    assert KINDS[name].held(folder) == COUNT


def test_damage_is_not_sealed_by_adding_documents(kind, tmp_path):
    kind.write(tmp_path / "part", BEFORE)
    for file in data_files(tmp_path / "part") if kind.adds else ():
        folder = shutil.copytree(tmp_path / "part", tmp_path / f"damaged {file.name}")
        content = file.read_bytes()
        (folder / file.name).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(ValueError, match=f"{folder / file.name} is (truncated or )?damaged"):
            kind.write(folder)
            kind.checked(kind.open(folder))


def test_what_is_damaged_is_cut_off_and_written_again(kind, tmp_path):
    folder = tmp_path / "whole"
    before = {file.name: file.read_bytes() for file in files(folder)}
    [sound] = check_folder(folder, repair=True)
    assert (sound.damage, sound.repaired) == (None, False) and sound.documents in (COUNT, None)
    assert {file.name: file.read_bytes() for file in files(folder)} == before
    for name in [file.name for file in data_files(folder)]:
        size = len(before[name])
        for place, cut in ((size - 30, False), (size // 2 + 20, True), (size - 1, False), (0, False)):
            damaged = shutil.copytree(folder, tmp_path / "damaged")
            content = bytearray(before[name])
            content[place] ^= 4
            (damaged / name).write_bytes(content[:place] if cut else content)
            [found] = check_folder(damaged)
            assert found.damage.startswith(str(damaged / name)) and not found.repaired
            if place == 0 and isinstance(kind, Corpora):
                with pytest.raises(ValueError, match=f"repair_corpus: {damaged} has no sound document; write the corp"):
                    check_folder(damaged, repair=True)
            elif kind.adds:
                [found] = check_folder(damaged, repair=True)
                assert found.repaired and found.damage and found.documents < COUNT
                assert check_folder(damaged)[0].damage is None and kind.held(damaged) == found.documents
                kind.write(damaged)
                assert kind.held(damaged) == COUNT
            else:
                assert not check_folder(damaged, repair=True)[0].repaired
            shutil.rmtree(damaged)


def test_no_more_is_cut_off_than_is_damaged(tmp_path):
    KINDS["bfloat16"].write(tmp_path)
    bounds, file = Corpus(tmp_path).parts[0].bounds, tmp_path / "values.bin"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    kept, damaged = repair_corpus(tmp_path), len(content) // 2 // checksums.CHUNK * checksums.CHUNK
    assert bounds[kept] * 16 * 2 <= damaged < bounds[kept + 1] * 16 * 2


def test_of_several_ranks_only_the_last_is_cut_back(tmp_path):
    for rank in (0, 1):
        write_corpus(tmp_path, [KINDS["bfloat16"].batch(12 * rank, 12 * rank + 12)], rank=(rank, 2))
    damaged = [tmp_path / f"rank-0000{rank}-of-00002" / "values.bin" for rank in (0, 1)]
    os.truncate(damaged[1], damaged[1].stat().st_size // 2)
    kept = repair_corpus(tmp_path)
    assert 12 < kept < 24 and len(Corpus(tmp_path)) == kept
    damaged[0].write_bytes(bytes(damaged[0].stat().st_size))
    with pytest.raises(ValueError, match=f"Corpus: {damaged[0]} is damaged"):
        repair_corpus(tmp_path)


def test_all_that_a_folder_holds_is_checked(tmp_path):
    (tmp_path / "empty").mkdir()
    for name, said in ((".", "holds no sparse index, token embeddings or static model"), ("no", "no fol")):
        with pytest.raises(ValueError, match=said):
            check_folder(tmp_path / name)
    for name, kind in KINDS.items():
        kind.write(tmp_path / name)
    with pytest.raises(KeyboardInterrupt):
        KINDS["sparse"].write(tmp_path / "begun", fail_at=20)
    what = {name: (f"token embeddings ({name})", COUNT) for name in FORMATS}
    what["index"] = "token embeddings (int8)", COUNT
    what |= dict.fromkeys(("sparse", "saved"), ("a sparse index", COUNT)) | {"static": ("a static model", None)}
    what["begun"] = ("what a call has begun to write, and the same call goes on with", None)
    found = check_folder(tmp_path)
    assert {each.folder.name: (each.what, each.documents) for each in found} == what
    assert not any(each.damage for each in found)


@pytest.mark.parametrize(
    ("name", "file", "changed", "said"),
    [
        ("sparse", "index.json", {"format": "other"}, "SparseIndex.load: .* is damaged, or of another release"),
        ("sparse", "index.json", {"documents_per_block": 9}, "has blocks of 9 documents, but this release has 8"),
        ("bfloat16", "corpus.json", {"format": "other"}, "Corpus: .* is damaged, or of another release; put it back"),
    ],
)
def test_folders_of_another_release_are_refused(name, file, changed, said, tmp_path):
    KINDS[name].write(tmp_path)
    write_record(tmp_path / file, read_record(tmp_path / file) | changed)
    with pytest.raises(ValueError, match=said):
        KINDS[name].open(tmp_path)


def test_a_codec_that_is_not_that_of_the_corpus(tmp_path):
    KINDS["residual"].write(tmp_path)
    codec(seed=1).save(tmp_path / "codec.safetensors")
    with pytest.raises(ValueError, match="codec.safetensors is not the codec that the corpus was written with; put"):
        Corpus(tmp_path)
