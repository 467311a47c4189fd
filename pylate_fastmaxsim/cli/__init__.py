"""The command ``fastmaxsim``: ``add_NAME_arguments(parser)`` and ``run_NAME(options)`` of each command in a module.

``run``, ``doctor`` and ``compare`` of a script need no extra, all others [recipes].
"""

import argparse
import importlib
import io
import sys
from collections.abc import Sequence
from types import ModuleType

import pylate_fastmaxsim
from pylate_fastmaxsim._install import install_command

COMMANDS = {
    "recipes": "List the recipes that come with the package, which every command takes by name; show one, or copy it to edit.",
    "train": "Train the model of a recipe, with checkpoints, and save it.",
    "compare": "Train a recipe with the stock library and with this package, and compare them; or run some steps of a script: "
    "fastmaxsim compare train.py ARGS.",
    "mine": "Find hard negatives for a recipe's pairs, score them with its teacher, and write training data.",
    "robustness": "Measure a trained model on longer documents and on documents with injected tokens, by several poolings.",
    "evaluate": "Evaluate trained models on a collection by exact search, and compare them.",
    "search": "Search a collection exactly with a late-interaction or sparse model: a run file, metrics and times.",
    "export": "Write the documents of an index, with their ids, for another system; a command that was killed goes on.",
    "check": "Compare an index, token embeddings or a static model with its checksums; code 1 if something is damaged.",
    "warmup": "Compile the kernels of a recipe, or for batches of given sizes, ahead of time, so that training does not wait for them (CUDA GPU).",
    "run": "Run a training script with this package enabled: fastmaxsim run SCRIPT.py ARGS.",
    "doctor": "Show versions, devices, what enable() accelerates, and what falls back and why; or whether the texts of a model, a "
    "recipe or a script are packed, grouped or padded.",
    "completion": "Print a script by which a shell completes commands, options and recipes.",
}
# The modules of commands; of another one the module has its name.
_MODULES = {"evaluate": "search", **dict.fromkeys(("train", "compare", "mine", "warmup"), "recipes")}
# What a command may find missing: of the extra [recipes], and the library of models.
_NEEDED = ("rich", "yaml", "datasets", "accelerate", "sentence_transformers")


def main() -> None:
    """Run the command that the command line names."""
    name, *arguments = sys.argv[1:] or ["--help"]
    if name == "run":
        from pylate_fastmaxsim.integrations.run_script import run_script

        run_script(arguments)
        return
    if isinstance(sys.stdout, io.TextIOWrapper):
        # The terminal's encoding may lack letters of names and paths; stderr already escapes them.
        sys.stdout.reconfigure(errors="replace")
    # Of a script or a module, not of a recipe.
    of_script = any(word == "-m" or (word.endswith(".py") and "=" not in word) for word in arguments)
    if name == "compare" and of_script:
        from pylate_fastmaxsim.comparison.script import compare_script

        compare_script(arguments)
    elif name == "doctor" and of_script:
        from pylate_fastmaxsim.cli.doctor import doctor_script

        doctor_script(arguments)
    elif name == "doctor" and {*arguments} <= {"-v", "--verbose"}:  # which needs no extra
        from pylate_fastmaxsim.integrations.doctor import report

        print(report(verbose=bool(arguments)))
    elif name in COMMANDS:
        _run_command(name, arguments)
    else:
        title = "Train late-interaction and SPLADE models without padding, similarity tensors and vocabulary logits."
        width = max(map(len, COMMANDS))
        overview = "\n".join([title, "", *(f"  {each:{width}}  {text}" for each, text in COMMANDS.items())])
        parser = argparse.ArgumentParser(
            "fastmaxsim", description=overview, formatter_class=argparse.RawTextHelpFormatter
        )
        parser.add_argument("--version", action="version", version=f"pylate-fastmaxsim {pylate_fastmaxsim.__version__}")
        parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help="fastmaxsim COMMAND --help says more")
        parser.parse_args([name])


def command_parser(name: str) -> argparse.ArgumentParser:
    """The parser of a command whose arguments are no script."""
    parser = argparse.ArgumentParser(f"fastmaxsim {name}", description=COMMANDS[name], allow_abbrev=False)
    getattr(_module(name), f"add_{name}_arguments")(parser)
    return parser


def script_parser_of(name: str) -> argparse.ArgumentParser | None:
    """The parser of a command whose arguments are a script; None where it takes none."""
    if name == "run":
        from pylate_fastmaxsim.integrations.run_script import script_parser

        return script_parser("fastmaxsim run", COMMANDS[name])
    if name == "compare":
        from pylate_fastmaxsim.comparison.script_child import script_comparison_parser

        return script_comparison_parser("fastmaxsim compare")
    if name == "doctor":
        from pylate_fastmaxsim.cli.doctor import script_doctor_parser

        return script_doctor_parser("fastmaxsim doctor")
    return None


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"{__name__}.{_MODULES.get(name, name)}")


def _run_command(name: str, arguments: Sequence[str]) -> None:
    try:
        parser = command_parser(name)
        if not {"-h", "--help"}.isdisjoint(arguments) and (of_script := script_parser_of(name)) is not None:
            print(f"{parser.format_help()}\nOf a script:\n\n{of_script.format_help()}", end="")
            return
        options = parser.parse_intermixed_args(arguments)
        from pylate_fastmaxsim.cli.terminal import report_errors

        with report_errors():
            getattr(_module(name), f"run_{name}")(options)
    except ModuleNotFoundError as error:
        missing = str(error.name).partition(".")[0]
        if missing not in _NEEDED:
            raise
        sys.exit(
            f"fastmaxsim: {missing} is missing, which every command but run, doctor and compare of a script needs: "
            f"{install_command('pylate', 'recipes')}, or in place of PyLate's {install_command('multi-vector')}."
        )
    except KeyboardInterrupt:  # while modules are imported, which takes seconds
        print("\nInterrupted.", file=sys.stderr)
        sys.exit(130)
