import statistics

from pylate_fastmaxsim.recipes.data.docstrings import docstring_pairs, split_docstring


def test_pairs_are_many_uneven_and_the_same_each_time():
    pairs = docstring_pairs(["numpy"], limit=600, seed=3)
    assert pairs[:100] == docstring_pairs(["numpy"], limit=100, seed=3)
    assert pairs[:20] != docstring_pairs(["numpy"], limit=20, seed=4)
    assert len({pair["query"] for pair in pairs}) == len({pair["positive"] for pair in pairs}) == len(pairs) == 600
    for pair in pairs:
        assert pair["query"].lower() not in pair["positive"].lower()
        assert pair["query"] == " ".join(pair["query"].split())
    lengths = [len(pair["positive"].split()) for pair in pairs]
    quarters = statistics.quantiles(lengths, n=4)
    assert min(lengths) >= 12 and quarters[2] > 3 * quarters[0]


def test_a_docstring_is_split_after_its_first_sentence_and_without_its_signature():
    rest = "The rest of it is long enough to be a document, i.e. it has at least a dozen words."
    signed = f"\n    take(a, axis=None)\n\n    Take the elements of\n    an array.  {rest}\n"
    assert split_docstring(signed) == ("Take the elements of an array.", rest)
    assert split_docstring(f"Take the elements of an array\n\n{rest}") == ("Take the elements of an array", rest)
    assert split_docstring(f"Take it. {rest}") is None
    assert split_docstring(f"Take the elements of an array. {rest} Take the elements of an array, again.") is None
