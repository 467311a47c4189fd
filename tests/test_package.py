"""The package's public names are listed, and loaded when they are first asked for; what it needs is declared."""

import subprocess
import sys
from importlib.metadata import requires

import pytest

import pylate_fastmaxsim


def test_every_public_name_is_listed():
    assert set(pylate_fastmaxsim.__all__) <= set(dir(pylate_fastmaxsim))
    with pytest.raises(AttributeError, match="module 'pylate_fastmaxsim' has no attribute 'maxsims'"):
        pylate_fastmaxsim.maxsims  # noqa: B018


def test_a_name_is_loaded_when_it_is_first_asked_for_and_kept():
    code = (
        "import sys, pylate_fastmaxsim\n"
        "assert 'maxsim' in dir(pylate_fastmaxsim) and 'pylate_fastmaxsim.ops.maxsim' not in sys.modules\n"
        "function = pylate_fastmaxsim.maxsim\n"
        "assert vars(pylate_fastmaxsim)['maxsim'] is function is sys.modules['pylate_fastmaxsim.ops.maxsim'].maxsim\n"
        "for name in pylate_fastmaxsim.__all__:\n"
        "    assert getattr(pylate_fastmaxsim, name) is not None\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_numpy_comes_with_the_package():
    # PyTorch is installed without it, and then neither writes a corpus nor hands a tensor over.
    assert "numpy" in requires("pylate-fastmaxsim")
