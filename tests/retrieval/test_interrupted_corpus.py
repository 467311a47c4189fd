"""A corpus whose writing is interrupted loses at most what its journal does not count, and goes on."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from itertools import islice

import pytest
import torch

from pylate_fastmaxsim import TokenBatch
from pylate_fastmaxsim.files.lock import writing
from pylate_fastmaxsim.files.record import read_record
from pylate_fastmaxsim.retrieval.corpus import Corpus, write_corpus
from tests.support.corpora import codec, grouped, lists, unit_documents

SIZE = 5
FORMATS = [None, "int8", "fp8", codec()]
NAMES = ["bfloat16", "int8", "fp8", "residual"]


def rest(
    sequences: list[torch.Tensor], held_before: list[int], fails_at: int | None = None, error: type = RuntimeError
):
    """The batches of write_corpus as a function; ``held_before`` gets what it is called with."""

    def batches(held: int):
        held_before.append(held)
        for batch in grouped(sequences[held:], SIZE):
            if held == fails_at:
                raise error("the encoder fails")
            held += len(batch)
            yield batch

    return batches


def content(folder) -> dict[str, bytes]:
    """Of the data files and checksums, without those of identities."""
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.suffix in (".bin", ".safetensors")}


@pytest.mark.parametrize("format", FORMATS, ids=NAMES)
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, OSError, ValueError])
def test_after_an_error_the_same_call_goes_on(format, error, tmp_path):
    sequences, held = unit_documents(30), []
    whole = write_corpus(tmp_path / "whole", grouped(sequences, SIZE), format=format)
    for _ in range(2):
        with pytest.raises(error):
            write_corpus(tmp_path / "new", rest(sequences, held, fails_at=20, error=error), format=format)
        with pytest.raises(
            ValueError, match="new holds no complete corpus, .* or go on with what an interrupted call has"
        ):
            Corpus(tmp_path / "new")
    write_corpus(tmp_path / "new", rest(sequences, held), format=format)
    assert held == [0, 20, 20] and content(tmp_path / "new") == content(whole.folder)


def test_an_interrupted_corpus_is_not_overwritten(tmp_path):
    sequences, held = unit_documents(30), []
    with pytest.raises(RuntimeError):
        write_corpus(tmp_path, rest(sequences, held, fails_at=20))
    before = content(tmp_path)
    with pytest.raises(ValueError, match="must be empty; .* or go on with its 20 documents, with a function as"):
        write_corpus(tmp_path, grouped(sequences, SIZE))
    for other, sentence in (
        (
            {"format": "int8"},
            "holds 20 documents of the format 'bfloat16', which cannot go on with int8; choose another",
        ),
        ({"dtype": torch.float32}, "cannot go on with float32"),
        ({"format": codec()}, "cannot go on with a codec of 2 bits and d = 16"),
    ):
        with pytest.raises(ValueError, match=sentence):
            write_corpus(tmp_path, rest(sequences, held), **other)
    with pytest.raises(ValueError, match="must have the same d, .* got 16 and 2"):
        write_corpus(tmp_path, lambda held: [TokenBatch.from_list([torch.ones(1, 2)])])
    with pytest.raises(TypeError, match="batches must be batches of documents, as a list of TokenBatch, got NoneType"):
        write_corpus(tmp_path, lambda held: None)
    with writing("test", tmp_path), pytest.raises(ValueError, match="is being written by another process"):
        write_corpus(tmp_path, rest(sequences, held))
    assert content(tmp_path) == before
    assert len(write_corpus(tmp_path, rest(sequences, held))) == 30


def test_another_codec_is_refused(tmp_path):
    sequences = unit_documents(30)
    with pytest.raises(RuntimeError):
        write_corpus(tmp_path, rest(sequences, [], fails_at=20), format=codec())
    with pytest.raises(ValueError, match=r"that is not the one that they were begun with \(codec.safetensors\)"):
        write_corpus(tmp_path, rest(sequences, []), format=codec(seed=1))
    assert len(write_corpus(tmp_path, rest(sequences, []), format=codec())) == 30


def test_a_file_that_is_shorter_than_its_journal_says(tmp_path):
    sequences = unit_documents(30)
    with pytest.raises(RuntimeError):
        write_corpus(tmp_path, rest(sequences, [], fails_at=20))
    before = (tmp_path / "values.bin").read_bytes()
    (tmp_path / "values.bin").write_bytes(before[:-1])
    with pytest.raises(
        ValueError,
        match=f"values.bin must have at least {len(before)} bytes, but has {len(before) - 1}; put it back, or",
    ):
        write_corpus(tmp_path, rest(sequences, []))
    (tmp_path / "values.bin").write_bytes(before)
    assert len(write_corpus(tmp_path, rest(sequences, []))) == 30


def test_without_a_document_another_format_may_begin(tmp_path):
    sequences = unit_documents(10)
    with pytest.raises(RuntimeError):
        write_corpus(tmp_path, rest(sequences, [], fails_at=0), format="int8")
    with pytest.raises(ValueError, match="finite"):
        write_corpus(tmp_path, lambda held: [TokenBatch.from_list([torch.full((1, 16), torch.nan)])], format="fp8")
    assert write_corpus(tmp_path, rest(sequences, []), format=codec()).format == "residual"


def test_a_corpus_is_added_to_and_opens_meanwhile(tmp_path):
    sequences, held = unit_documents(30), []
    write_corpus(tmp_path, rest(sequences[:12], held))
    before = content(tmp_path)
    assert len(write_corpus(tmp_path, rest(sequences[:12], held))) == 12 and content(tmp_path) == before
    with pytest.raises(RuntimeError):
        write_corpus(tmp_path, rest(sequences, held, fails_at=22))
    read = Corpus(tmp_path)
    assert lists(read.batches()) == lists([TokenBatch.from_list([each.bfloat16() for each in sequences[:12]])])
    assert len(write_corpus(tmp_path, rest(sequences, held))) == 30 and held == [0, 12, 12, 22]
    whole = write_corpus(tmp_path / "whole", grouped(sequences, SIZE))
    assert lists(Corpus(tmp_path).batches()) == lists(whole.batches())


def test_there_is_a_journal_before_there_is_anything_else(tmp_path):
    sequences, counted = unit_documents(30), []

    def batches(held):
        for batch in grouped(sequences[held : held + 15], SIZE):
            yield batch
            counted.append((read_record(tmp_path / "unfinished.json") or {}).get("documents"))

    for _ in range(2):
        write_corpus(tmp_path, batches)
    # The second call begins from a corpus, which says itself what counts.
    assert counted == [0, 0, 0, None, None, None]


def test_other_files_are_left_alone(tmp_path):
    (tmp_path / "values.bin").write_text("of somebody else")
    with pytest.raises(ValueError, match="must be empty; choose another folder, or remove what it holds.$"):
        write_corpus(tmp_path, rest(unit_documents(5), []))
    assert (tmp_path / "values.bin").read_text() == "of somebody else"


def endless(held: int):
    """The same 100 documents again and again."""
    sequences = unit_documents(100)
    while True:
        yield TokenBatch.from_list([sequences[number % 100] for number in range(held, held + SIZE)])
        held += SIZE


@pytest.mark.process
@pytest.mark.smoke
def test_a_process_that_is_killed_goes_on(tmp_path):
    code = (
        "import sys\n"
        "from tests.support.corpora import codec\n"
        "from tests.retrieval.test_interrupted_corpus import endless\n"
        "from pylate_fastmaxsim.retrieval.corpus import write_corpus\n"
        "from pylate_fastmaxsim.retrieval.formats import writer\n"
        "writer.SECONDS_BETWEEN_NOTES = 0.01\n"
        "write_corpus(sys.argv[1], endless, format=codec())\n"
    )
    running = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)])
    while (found := read_record(tmp_path / "unfinished.json")) is None or found["documents"] < 100:
        assert running.poll() is None
        time.sleep(0.02)
    running.send_signal(signal.SIGKILL)
    assert running.wait() == -signal.SIGKILL
    with pytest.raises(ValueError, match="holds no complete corpus"):
        Corpus(tmp_path)
    held = []
    read = write_corpus(tmp_path, lambda count: held.append(count) or islice(endless(count), 20), format=codec())
    assert held[0] >= 100 and len(read) == held[0] + 20 * SIZE
    batches = islice(endless(0), len(read) // SIZE)
    assert content(tmp_path) == content(write_corpus(tmp_path.with_name("whole"), batches, format=codec()).folder)
