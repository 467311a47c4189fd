import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from pylate_fastmaxsim.integrations import doctor
from pylate_fastmaxsim.integrations.options import current_options

pytest.importorskip("pylate")


def test_the_doctor_says_what_is_here_and_changes_nothing(monkeypatch):
    monkeypatch.delenv("PYLATE_FASTMAXSIM", raising=False)
    monkeypatch.setenv("PYLATE_SCORES_BACKEND", "torch")
    found, text = doctor.diagnose(), doctor.report(verbose=True)
    assert current_options() is None
    assert {"pylate.scores.colbert.colbert_scores", "pylate.rank.rank.rerank"} <= set(found["enable() replaces"])
    assert any("PYLATE_SCORES_BACKEND=torch" in line for line in found["What falls back here"])
    for title, lines in found.items():
        assert "\n".join([title, *(f"  {line}" for line in lines)]) in text
    assert "pylate.rank" not in doctor.report()
    assert re.search("PYLATE_FASTMAXSIM +not set", text) and re.search(r"  torch +\d", text)


def test_the_doctor_works_without_a_host(monkeypatch):
    monkeypatch.setitem(sys.modules, "pylate", None)
    monkeypatch.setitem(sys.modules, "colpali_engine", None)
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    assert "not installed" in doctor.diagnose()["What falls back here"][0]
    assert "enable() accelerates\n  nothing" in doctor.report()


@pytest.mark.parametrize(("value", "sentence"), [("off", "enable() does nothing"), ("maybe", "enable() raises")])
def test_the_doctor_reads_the_switch(value, sentence, monkeypatch):
    monkeypatch.setenv("PYLATE_FASTMAXSIM", value)
    assert any(sentence in line for line in doctor.diagnose()["What falls back here"])


@pytest.mark.parametrize(
    ("capability", "cuda", "kernels", "packed"),
    [((7, 5), "12.8", False, False), ((9, 0), "12.8", True, True), ((9, 4), None, False, True)],
)
def test_the_doctor_says_which_gpus_have_no_kernels(capability, cuda, kernels, packed, monkeypatch):
    def fail(*args, **kwargs):
        raise subprocess.TimeoutExpired("", 30)  # of nvidia-smi

    monkeypatch.setattr(subprocess, "run", fail)
    card = SimpleNamespace(name="A card", major=capability[0], minor=capability[1], total_memory=80 * 2**30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: card)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    found = doctor.diagnose()
    (line,) = found["Devices"]
    assert line.startswith("cuda:0 A card,") and "driver unknown" in line
    lines = found["What falls back here"]
    assert kernels != any("instead of the CUDA kernels" in line for line in lines)
    assert packed != any("no variable-length attention" in line for line in lines)


@pytest.mark.cuda
def test_the_doctor_sees_the_gpu():
    assert any(line.startswith("cuda:0 ") and "driver" in line for line in doctor.diagnose()["Devices"])
