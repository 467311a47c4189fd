import pytest

from pylate_fastmaxsim.files.record import read_again_if_replaced, read_record, write_record

VALUES = {"format": "a format 1", "files": {"a": [3, "00ff"]}, "scale": 0.1, "removed": [1, 2]}


def test_no_flipped_bit_gives_other_values(tmp_path):
    file = tmp_path / "record.json"
    assert read_record(file) is None
    write_record(file, VALUES)
    assert read_record(file) == VALUES
    content = file.read_bytes()
    for bit in range(8 * len(content)):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        file.write_bytes(flipped)
        try:
            assert read_record(file) == VALUES
        except ValueError as error:
            assert str(error) == f"{file} is damaged, or of another release."


@pytest.mark.parametrize(
    "text", ["", "[" * 100_000, "[]", '{"checksum": 1}', '{"a": 1}', '{"a": %s}' % ("9" * 5000), "\xff"]
)
def test_something_else_is_damaged(text, tmp_path):
    (tmp_path / "record.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match="is damaged, or of another release"):
        read_record(tmp_path / "record.json")


def test_a_reader_that_loses_a_race_tries_again(tmp_path):
    file, reads = tmp_path / "record.json", []

    def read():
        reads.append(read_record(file)["generation"])
        if reads[-1] < 3:
            write_record(file, {"generation": reads[-1] + 1})
            raise ValueError("a file is missing")
        return reads[-1]

    write_record(file, {"generation": 1})
    assert read_again_if_replaced(file, read) == 3 and reads == [1, 2, 3]
    reads.clear()
    with pytest.raises(ValueError, match="a file is missing"):
        read_again_if_replaced(file, lambda: (_ for _ in ()).throw(ValueError("a file is missing")))
