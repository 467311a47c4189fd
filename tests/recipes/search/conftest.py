import pytest
import torch


@pytest.fixture(autouse=True)
def on_cpu(request, monkeypatch) -> None:
    """Kernels know the size of a block, which tests change."""
    if request.node.get_closest_marker("cuda") is None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def files(tmp_path) -> list[str]:
    """The arguments that name documents and queries."""
    from tests.support.beir_folder import write_folder

    folder = write_folder(tmp_path / "data")
    return ["--corpus", f"{folder}/corpus.jsonl", "--queries", f"{folder}/queries.jsonl"]
