"""Sources of releases that are not installed: what a file says is compared with the table, for all that the index has."""

import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path

import pytest
from packaging.version import Version

from pylate_fastmaxsim.integrations.hosts import HOSTS
from tools import record_sources

# What the README leaves out: SPLADE is trained from 5.1 on. Transformer.forward is replaced for PyLate only, which needs 5.3.
LEFT_OUT = {
    ("sentence-transformers", "5.0.0"): [
        "sentence_transformers.SentenceTransformer.SentenceTransformer.device",
        "sentence_transformers.models.Transformer.Transformer.forward",
        "sentence_transformers.sparse_encoder.models.MLMTransformer.MLMTransformer.forward",
    ],
    ("sentence-transformers", "5.1.0"): ["sentence_transformers.models.Transformer.Transformer.forward"],
}


def wheel_of(folder: Path, package: str, edits: dict[str, tuple[str, str]]) -> zipfile.Path:
    root = Path(import_module(package).__file__).parent
    with zipfile.ZipFile(folder / "edited.whl", "w") as wheel:
        for file in root.rglob("*.py"):
            text = file.read_text(encoding="utf-8")
            old, new = edits.get(file.name, ("", ""))
            assert old in text
            wheel.writestr(f"{package}/{file.relative_to(root).as_posix()}", text.replace(old, new))
    return zipfile.Path(folder / "edited.whl")


def test_what_another_source_changes_is_named_without_an_import(tmp_path):
    package = "colpali_engine"
    assert record_sources.unknown_sources(wheel_of(tmp_path, package, {}), package) == []
    edits = {"maxsim.py": ("def _torch_maxsim(", "def _torch_maxsim_(")}  # which only what is replaced calls
    found = record_sources.unknown_sources(wheel_of(tmp_path, package, edits), package)
    assert found == ["colpali_engine.utils.maxsim._torch_maxsim"]
    moved = {"modeling_colpali.py": ("import torch\n", "import torch\n# moved\n")}
    wheel = wheel_of(tmp_path, package, moved)
    module = wheel / package / "models/paligemma/colpali/modeling_colpali.py"
    with zipfile.ZipFile(tmp_path / "edited.whl", "a") as other:
        other.writestr(f"{package}/new.py", module.read_text(encoding="utf-8"))
    found = record_sources.unknown_sources(zipfile.Path(tmp_path / "edited.whl"), package)
    assert found == ["colpali_engine.new.ColPali.forward"]


def pip(*arguments: object) -> str:
    command = [sys.executable, "-m", "pip", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode:
        pytest.skip(f"pip cannot reach an index: {(done.stderr.strip().splitlines() or [''])[-1]}")
    return done.stdout


def releases(package: str) -> list[str]:
    listed = pip("index", "versions", package).partition("Available versions: ")[2].partition("\n")[0].split(", ")
    ranges = [(Version(host.first), Version(host.below)) for host in HOSTS if host.package == package.replace("-", "_")]
    return [each for each in listed if any(first <= Version(each) < below for first, below in ranges)]


@pytest.mark.network
@pytest.mark.parametrize("package", ["pylate", "sentence-transformers", "colpali-engine"])
def test_each_release_that_is_accepted_is_known(package, tmp_path):
    def downloaded(release: str) -> zipfile.Path:
        folder = tmp_path / release
        pip("download", "-q", "--no-deps", "--only-binary", ":all:", "-d", folder, f"{package}=={release}")
        (wheel,) = folder.iterdir()
        return zipfile.Path(wheel)

    listed = releases(package)
    # Not read there as well: Python 3.11 cannot parse in two threads at once.
    with ThreadPoolExecutor(4) as pool:
        wheels = list(pool.map(downloaded, listed))
    found = {
        release: record_sources.unknown_sources(wheel, package.replace("-", "_"))
        for release, wheel in zip(listed, wheels, strict=True)
    }
    wanted = {release: LEFT_OUT.get((package, release), []) for release in listed}
    assert len(listed) > 0 and found == wanted, "Test what is new, then run tools/record_sources.py with the release."
