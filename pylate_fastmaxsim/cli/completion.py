"""``fastmaxsim completion``: a script for a shell that completes commands, their options and names of recipes."""

import argparse
from collections.abc import Iterator

from pylate_fastmaxsim.cli import COMMANDS, command_parser, script_parser_of
from pylate_fastmaxsim.recipes.load import shipped_recipes

_BASH = """_fastmaxsim() {{
  local found="{commands}"
  [ "$COMP_CWORD" -gt 1 ] && case "${{COMP_WORDS[1]}}" in
{cases}
    *) found="" ;;
  esac
  COMPREPLY=($(compgen -W "$found" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -F _fastmaxsim fastmaxsim"""


def add_completion_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the name of a shell."""
    how = 'bash, zsh or fish: eval "$(fastmaxsim completion bash)" in ~/.bashrc, or into a file of fish\'s completions'
    parser.add_argument("shell", choices=["bash", "zsh", "fish"], help=how)


def run_completion(options: argparse.Namespace) -> None:
    """Print the script."""
    if options.shell == "fish":
        for name, meaning in COMMANDS.items():
            print(f"complete -c fastmaxsim -n __fish_use_subcommand -f -a {name} -d {_quoted(meaning)}")
            for word, text in _words(name):
                kind = f"-l {word[2:]}" if word.startswith("--") else f"-a {word}"
                print(f"complete -c fastmaxsim -n '__fish_seen_subcommand_from {name}' {kind} -d {_quoted(text)}")
        return
    if options.shell == "zsh":
        print("autoload -U +X compinit bashcompinit && compinit && bashcompinit")
    cases = (f'    {name}) found="{" ".join(word for word, _ in _words(name))}" ;;' for name in COMMANDS)
    print(_BASH.format(commands=" ".join(COMMANDS), cases="\n".join(cases)))


def _words(name: str) -> Iterator[tuple[str, str]]:
    """The words of a command that can be completed, each with its meaning."""
    parsers = filter(None, (None if name == "run" else command_parser(name), script_parser_of(name)))
    for action in (action for parser in parsers for action in parser._actions):
        meaning = (action.help or "") % vars(action)
        yield from ((option, meaning) for option in action.option_strings if option.startswith("--"))
        if not action.option_strings:
            yield from ((choice, meaning) for choice in action.choices or ())
            if "RECIPE" in str(action.metavar) or name == "recipes" and action.dest == "name":
                yield from ((recipe, "a recipe") for recipe in shipped_recipes())


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
