"""What enable() prints and returns, and what status() says of models that were called."""

import pytest

import pylate_fastmaxsim
from tests.support.models import load_model

pytest.importorskip("pylate")


@pytest.fixture
def said(monkeypatch, capsys):
    monkeypatch.delenv("PYLATE_FASTMAXSIM_QUIET", raising=False)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    return lambda: capsys.readouterr().err


def test_one_line_says_what_is_on(said, monkeypatch):
    assert pylate_fastmaxsim.enable().options.compile is False
    assert said().startswith("pylate-fastmaxsim: on, for PyLate 1.") and pylate_fastmaxsim.enable(quiet=True)
    for name in ("PYLATE_FASTMAXSIM_QUIET", "LOCAL_RANK"):
        with monkeypatch.context() as each:
            each.setenv(name, "1")
            pylate_fastmaxsim.enable()
    with pylate_fastmaxsim.enabled(compile=True, pooling="top_k=4"):
        assert pylate_fastmaxsim.status().options.pooling == pylate_fastmaxsim.TopK(4)
        assert pylate_fastmaxsim.status().options.compile
    assert said() == ""
    pylate_fastmaxsim.disable()
    monkeypatch.setenv("PYLATE_FASTMAXSIM", "0")
    state = pylate_fastmaxsim.enable()
    assert said() == "pylate-fastmaxsim: off, by PYLATE_FASTMAXSIM=0\n" and str(state) == "pylate-fastmaxsim: off"


@pytest.mark.parametrize("padding_free, expected", [(True, "Documents are packed"), (False, None)])
def test_the_first_batch_says_how_a_model_is_encoded(encoder, packed, padding_free, expected):
    from pylate import losses

    model = load_model(encoder("modernbert"))
    pylate_fastmaxsim.enable(padding_free=padding_free)
    assert "fused MaxSim" in str(pylate_fastmaxsim.status()) and not pylate_fastmaxsim.status().models
    columns = [model.tokenize(["one", "two words"], is_query=side) for side in (True, False)]
    losses.Contrastive(model)(columns).backward()
    lines = pylate_fastmaxsim.status().models.get("ColBERT", [])
    assert [line.split(":")[0] for line in lines if "Documents" in line] == ([expected] if expected else [])
    assert all(f"  ColBERT: {line}" in str(pylate_fastmaxsim.status()) for line in lines)
    pylate_fastmaxsim.disable()
    assert pylate_fastmaxsim.status().models == {}
