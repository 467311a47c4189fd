"""Corpora in compressed formats, and of several parts."""

from __future__ import annotations

import pytest
import torch

from pylate_fastmaxsim import TokenBatch
from pylate_fastmaxsim.compressed import CompressedBatch, compress
from pylate_fastmaxsim.retrieval.corpus import Corpus, write_corpus
from tests.support.corpora import codec, documents, grouped, lists, unit_documents

FORMATS = ["int8", "fp8", codec(bits=2), codec(bits=4)]
NAMES = ["int8", "fp8", "2 bits", "4 bits"]


def decompressed(batches) -> list[list]:
    return lists(batch.decompress() for batch in batches)


@pytest.mark.parametrize("format", FORMATS, ids=NAMES)
@pytest.mark.parametrize("tokens", [1, 30, 1 << 20])
def test_what_is_read_is_what_compress_makes(format, tokens, tmp_path):
    sequences = unit_documents(40)
    kept = torch.rand(sum(map(len, sequences)), generator=torch.Generator().manual_seed(1)) < 0.8
    batch = TokenBatch.from_list(sequences)
    batch = TokenBatch(batch.values, batch.starts, batch.lengths, batch.max_length, kept)
    live = [tokens_[kept_] for tokens_, kept_ in zip(sequences, kept.split([len(s) for s in sequences]), strict=True)]
    read = write_corpus(tmp_path, [batch.select(torch.arange(25)), batch.select(torch.arange(25, 40))], format=format)
    expected = decompressed([compress(TokenBatch.from_list(live), format)])
    batches = list(read.batches(tokens_per_batch=tokens))
    assert all(isinstance(batch, CompressedBatch) and batch.gapless for batch in batches)
    assert decompressed(batches) == expected and (len(read), read.tokens) == (40, int(kept.sum()))
    assert decompressed(read.batches(begin=7, end=31)) == expected[7:31]
    chosen = torch.tensor([39, 0, 7, 7, 30])
    assert decompressed([read.select(chosen)]) == [expected[i] for i in chosen.tolist()]
    assert len(read.select([])) == 0


def test_residual_codes_of_two_bits_take_less_than_a_sixth(tmp_path):
    sequences = [torch.nn.functional.normalize(torch.randn(80, 128), dim=-1) for _ in range(50)]
    sizes = {}
    for name, format in (("plain", None), ("int8", "int8"), ("residual", codec(d=128))):
        read = write_corpus(tmp_path / name, grouped(sequences, 50), format=format)
        files = [file for file in (tmp_path / name).glob("*.bin") if not file.name.startswith("checksums-")]
        sizes[name] = sum(file.stat().st_size for file in files)
        assert read.nbytes == sizes[name] and read.format == ("bfloat16" if name == "plain" else name)
    assert sizes["int8"] < 0.51 * sizes["plain"] and sizes["residual"] < sizes["plain"] / 6


@pytest.mark.parametrize("format", [None, *FORMATS], ids=["bfloat16", *NAMES])
def test_several_processes_write_one_corpus(format, tmp_path):
    sequences = unit_documents(50)
    shares = [sequences[:20], sequences[20:21], sequences[21:]]
    for rank in (2, 0):
        part = write_corpus(tmp_path, grouped(shares[rank], 7), format=format, rank=(rank, 3))
        assert len(part) == len(shares[rank])
        with pytest.raises(ValueError, match=r"Corpus: .* lacks the documents of rank . of 3: .* rank=\(., 3\)"):
            Corpus(tmp_path)
    write_corpus(tmp_path, grouped(shares[1], 7), format=format, rank=(1, 3))
    read, whole = Corpus(tmp_path), write_corpus(tmp_path / "whole", grouped(sequences, 50), format=format)
    as_lists = lists if format is None else decompressed
    expected = as_lists(whole.batches())
    assert (len(read), read.tokens, as_lists(read.batches(tokens_per_batch=40))) == (50, whole.tokens, expected)
    assert as_lists(read.batches(begin=19, end=22)) == expected[19:22]
    chosen = [49, 20, 3, 21, 0, 20]
    assert as_lists([read.select(torch.tensor(chosen))]) == [expected[i] for i in chosen]


def test_ranks_that_do_not_fit_together(tmp_path):
    batches = grouped(unit_documents(5), 5)
    write_corpus(tmp_path, batches, format="int8", rank=(0, 2))
    with pytest.raises(
        ValueError, match=r"holds a corpus of 2 ranks, to which rank \(0, 3\) cannot add; choose another"
    ):
        write_corpus(tmp_path, batches, format="int8", rank=(0, 3))
    with pytest.raises(ValueError, match=r"rank \(r, n\) must have r from 0 to n - 1, got \(2, 2\)"):
        write_corpus(tmp_path, batches, format="int8", rank=(2, 2))
    with pytest.raises(TypeError, match=r"rank must be a pair of integers \(r, n\), got 1"):
        write_corpus(tmp_path, batches, format="int8", rank=1)
    write_corpus(tmp_path, batches, format="fp8", rank=(1, 2))
    with pytest.raises(
        ValueError, match="must be of one format and d, but .*rank-00001-of-00002 is fp8 of d = 16, and"
    ):
        Corpus(tmp_path)


@pytest.mark.parametrize("format", [None, "fp8", codec()], ids=["bfloat16", "fp8", "residual"])
def test_a_finished_rank_takes_no_more_documents_unless_it_is_the_last(format, tmp_path):
    sequences = unit_documents(20)
    shares, more = [sequences[:5], sequences[5:10]], sequences[10:]

    def write(rank, documents):
        return write_corpus(tmp_path, lambda held: grouped(documents[held:], 3), format=format, rank=(rank, 2))

    for rank, share in enumerate(shares):
        write(rank, share)
    as_lists = lists if format is None else decompressed
    before = as_lists(Corpus(tmp_path).batches())
    empty = TokenBatch.from_list(sequences[:1]).select(torch.tensor([], dtype=torch.int64))
    for nothing in ([], [empty]):
        assert len(write_corpus(tmp_path, lambda held, nothing=nothing: nothing, format=format, rank=(0, 2))) == 5
    with pytest.raises(
        ValueError, match="rank-00000-of-00002 is finished with 5 documents, and more would move those of"
    ):
        write(0, shares[0] + more)
    assert as_lists(Corpus(tmp_path).batches()) == before
    assert len(write(1, shares[1] + more)) == 15
    assert as_lists(Corpus(tmp_path).batches())[:10] == before and len(Corpus(tmp_path)) == 20


def test_ranks_may_have_fp8_scales_of_their_own(tmp_path):
    for rank, size in enumerate((1.0, 3.0)):
        write_corpus(tmp_path, [TokenBatch.from_list([torch.full((2, 4), size)])], format="fp8", rank=(rank, 2))
    read = Corpus(tmp_path)
    assert decompressed(read.batches()) == [[[1.0] * 4] * 2, [[3.0] * 4] * 2]
    assert decompressed([read.select([1])]) == [[[3.0] * 4] * 2]
    with pytest.raises(ValueError, match="Corpus.select: these documents are in parts of other codecs or fp8 scales; "):
        read.select([0, 1])
    assert [block.tolist() for block in read.blocks(torch.tensor([0, 1]), 100)] == [[0], [1]]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"format": "int4"}, "format must be None, 'int8', 'fp8' or a ResidualCodec, got 'int4'"),
        ({"format": "int8", "dtype": torch.float32}, "dtype is of documents that are not compressed; leave it out"),
        ({"format": codec(d=8)}, "all batches must have the same d, also that of a codec .*, got 8 and 16"),
    ],
)
def test_bad_formats_are_refused_and_leave_nothing(arguments, sentence, tmp_path):
    with pytest.raises(ValueError, match=f"^write_corpus: .*{sentence}"):
        write_corpus(tmp_path, grouped(unit_documents(5), 5), **arguments)
    assert {file.name for file in tmp_path.iterdir()} <= {"lock"}


def test_numbers_that_do_not_fit_are_refused(tmp_path):
    large = TokenBatch.from_list([torch.full((1, 4), 2.0)])
    with pytest.raises(
        ValueError, match="numbers of at most 1.75 in magnitude, which is what fits the fp8 scale 0.00390625"
    ):
        write_corpus(tmp_path, [TokenBatch.from_list([torch.ones(1, 4)]), large], format="fp8")
    assert write_corpus(tmp_path, [large, large], format="fp8").tokens == 2
    for format in ("int8", "fp8"):
        with pytest.raises(ValueError, match="finite"):
            write_corpus(tmp_path / format, [TokenBatch.from_list([torch.full((1, 4), torch.nan)])], format=format)


def test_positions_that_are_not_in_the_corpus(tmp_path):
    read = write_corpus(tmp_path, grouped(documents(5), 5))
    for wrong in ([5], [-1]):
        with pytest.raises(ValueError, match="Corpus.select: positions must be from 0 to 4, got"):
            read.select(wrong)
    for wrong in (torch.tensor([0.5]), torch.tensor([[1]]), torch.ones(5, dtype=torch.bool), "1"):
        with pytest.raises(TypeError, match="Corpus.select: positions must be int"):
            read.select(wrong)


@pytest.mark.cuda
@pytest.mark.parametrize("tokens", [1, 1000, 1 << 20])
@pytest.mark.parametrize("format", [None, *FORMATS], ids=["bfloat16", *NAMES])
def test_streamed_to_a_gpu_equals_what_is_on_disk(format, tokens, tmp_path):
    sequences = unit_documents(2000 if tokens > 1 else 50)
    write_corpus(tmp_path, grouped(sequences[::2], 100), format=format, rank=(0, 2))
    write_corpus(tmp_path, grouped(sequences[1::2], 100), format=format, rank=(1, 2))
    read = Corpus(tmp_path)
    as_lists = lists if format is None else decompressed
    assert as_lists(read.batches("cuda", tokens_per_batch=tokens)) == as_lists(read.batches())
    chosen = torch.tensor([40, 3, 49, 0])
    assert as_lists([read.select(chosen, "cuda")]) == as_lists([read.select(chosen)])
