"""The examples of README and docs/ run as printed, with stand-ins for models of the Hub; more are run beside what they show."""

import ast
import builtins
import re

import pytest
import torch

pytest.importorskip("pylate")

from sentence_transformers import SparseEncoder
from sentence_transformers.sparse_encoder.models import MLMTransformer, SpladePooling
from tokenizers import Tokenizer, models, pre_tokenizers

from pylate_fastmaxsim import SparseBatch, SparseIndex
from tests.support.compared import batch_of
from tests.support.examples import PAGES, example, run_example, run_script
from tests.support.paths import ROOT

MODERNBERT = '"answerdotai/ModernBERT-base"'
HUB = f'{MODERNBERT}|"lightonai/GTE-ModernColBERT-v1"'


@pytest.fixture(autouse=True)
def in_a_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


def unbound(code: str) -> set[str]:
    """Names that a block of code takes from elsewhere."""
    nodes = [*ast.walk(ast.parse(code))]
    bound = {(getattr(node, "asname", None) or node.name).partition(".")[0] for node in nodes if hasattr(node, "name")}
    bound |= {node.arg for node in nodes if isinstance(node, ast.arg)} | {*dir(builtins)}
    names = [node for node in nodes if isinstance(node, ast.Name)]
    return {node.id for node in names} - bound - {node.id for node in names if isinstance(node.ctx, ast.Store)}


def test_each_block_of_code_is_run_or_says_why_not():
    """By its name in a test that asks for examples. Recipes and commands are parsed: see test_readme.py."""
    tests = [path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py")]
    run = "".join(text for text in tests if "tests.support.examples" in text)
    named = []
    for page, text in PAGES.items():
        for mark, language in re.findall(r"^(.*)\n```(\w+)$", text, flags=re.MULTILINE):
            found = re.fullmatch(r"<!-- (example|not run|file): (.+) -->", mark)
            assert found or language in ("bash", "yaml"), f"{page}: a block of {language} below {mark!r}"
            named += [found[2]] if found and found[1] == "example" else []
        for mark, code in re.findall(r"<!-- (example|file): .+ -->\n```python\n(.*?)```", text, flags=re.DOTALL):
            assert not unbound(code), f"{page}: {unbound(code)} in a block of {mark}"
    assert len(named) == len(set(named)) > 20
    assert not [name for name in named if f'"{name}"' not in run]


# Examples, and what holds after each.
EXAMPLES = {
    "readme-search": lambda names: names.scores.shape == names.positions.shape == (1, 2),
    "search-corpus": lambda names: names.scores.shape == names.best.shape == names.positions.shape == (1, 2),
    "exact-index": lambda names: (
        [[each["id"] for each in names.found[0]], names.bread[0][0]["id"]] == [names.index.ids, "bread"]
    ),
    "compress": lambda names: (
        (names.scores.argmax(dim=1).tolist(), names.some.shape) == ([0, 2], (2, 2))
        and names.vectors.values.dtype == torch.bfloat16
        and names.documents.values.nbytes > 3 * names.small.nbytes > 6 * names.smaller.nbytes
    ),
    "compressed-corpus": lambda names: (
        names.positions[:, 0].tolist() == [7, 130] and names.coarse.nbytes < names.fine.nbytes / 6
    ),
    "plaid": lambda names: (
        [[found[0] for found in each] for each in (names.exhaustive, names.pruned)] == [["d7", "d130"]] * 2
    ),
    "pool-tokens": lambda names: (
        (names.half.lengths.tolist(), names.eight.lengths.tolist(), len(names.scores)) == ([90, 150], [8, 8], 2)
    ),
    "splade-pool": lambda names: names.values.shape == (3, 1000) and names.weight.grad is not None,
    "pooled-scores": lambda names: all(each.grad is not None for each in names.model[1].parameters()),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_run(name, encoder):
    hub = dict.fromkeys(re.findall(HUB, example(name)), repr(encoder("modernbert")))
    assert EXAMPLES[name](run_example(name, hub))


SCRIPTS = [path.stem for path in sorted((ROOT / "examples").glob("*.py"))]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("pylate_contrastive", "search") else pytest.mark.e2e)
        for name in SCRIPTS
        if name not in ("made_up", "multi_vector_encoder")
    ],
)
def test_the_scripts_print_what_stock_finds(name, capsys):
    run_script(name, capsys)


def test_the_example_of_sparse_search_finds_documents(encoder):
    SparseEncoder(modules=[MLMTransformer(encoder("bert")), SpladePooling()]).save("model")
    names = run_example("sparse-encoder", {'"naver/splade-v3"': '"model"'})
    assert names.scores.shape == names.positions.shape == (1, 2)
    assert sorted(names.positions[0].tolist()) == [0, 1] and len(names.index) == 3


def test_the_examples_of_static_late_interaction_find_documents():
    model2vec = pytest.importorskip("model2vec", reason="needs model2vec: pip install model2vec")
    words = ("[UNK]", "bees", "Bees", "dance", "dancing", "Bread", "bread")
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    model2vec.StaticModel(torch.eye(7)[[0, 1, 1, 3, 3, 5, 5]].numpy(), tokenizer).save_pretrained("table")
    names = run_example("static", {'"minishlab/potion-retrieval-32M"': '"table"'})
    assert names.positions.tolist() == [[0, 1], [1, 0]] and len(names.index) == 2


def test_the_lines_that_switch_pylate_on(encoder):
    names: dict = {}
    lines = example("enable-pylate", {MODERNBERT: repr(encoder("modernbert"))}).splitlines()
    exec("\n".join(line[1:] for line in lines), names)
    batch = [names["model"].tokenize(["bees", "bread"], is_query=is_query) for is_query in (True, False)]
    assert names["loss"](batch).requires_grad


def test_losses_that_the_hosts_lack(encoder):
    for name, labels in (
        ("contrastive-distillation", torch.rand(2, 2)),
        ("matryoshka", None),
        ("pooled-contrastive", None),
    ):
        names = run_example(name, {MODERNBERT: repr(encoder("modernbert"))})
        assert names.loss(batch_of(names.model, queries=2), labels).requires_grad


def test_the_examples_of_shares_and_of_a_server_search_an_index(monkeypatch, tmp_path):
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, value)
    on_a_cpu = {
        "torch.cuda.set_device(place)": "",
        '"nccl"': f'"gloo", init_method="file://{tmp_path}/store", rank=rank, world_size=ranks',
        'f"cuda:{place}"': '"cpu"',
    }
    SparseIndex.build(SparseBatch.from_lists([[(0, 2.0)], [(1, 1.0)], [(0, 1.0), (2, 4.0)]], 3), folder="index")
    try:
        assert run_example("sparse-shards", on_a_cpu).positions.tolist()[0][:2] == [2, 0]
        assert run_example("batching").positions.tolist()[:2] == [2, 0]
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.cuda
def test_the_example_of_a_warmup_compiles(capsys):
    run_example("warmup")
    assert capsys.readouterr().out
