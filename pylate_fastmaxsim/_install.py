"""The command that installs what an extra needs."""

from importlib.metadata import PackageNotFoundError, requires


def install_command(*extras: str) -> str:
    """``pip install`` of the packages of extras, wherever this package itself came from."""
    try:
        needed = [requirement.partition(";") for requirement in requires("pylate-fastmaxsim") or ()]
    except PackageNotFoundError:  # a checkout in PYTHONPATH
        return f'pip install ".[{",".join(extras)}]" in the checkout of pylate-fastmaxsim'
    packages = [name.strip() for name, _, marker in needed if marker.split("extra == ")[-1].strip(" '\"") in extras]
    return "pip install " + " ".join(f'"{name}"' for name in packages)
