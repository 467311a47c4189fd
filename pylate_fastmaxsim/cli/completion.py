"""``fastmaxsim completion``: a script for a shell that completes commands, their options and names of recipes."""

import argparse

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
    how = 'bash, zsh or fish: eval "$(fastmaxsim completion bash)" in ~/.bashrc, or into a file of fish\'s completions'
    parser.add_argument("shell", choices=["bash", "zsh", "fish"], help=how)


def run_completion(options: argparse.Namespace) -> None:
    commands, words = " ".join(COMMANDS), {name: " ".join(_words(name)) for name in COMMANDS}
    if options.shell == "fish":
        print(f"complete -c fastmaxsim -f -n __fish_use_subcommand -a '{commands}'")
        for name, found in words.items():
            print(f"complete -c fastmaxsim -n '__fish_seen_subcommand_from {name}' -a '{found}'")
        return
    if options.shell == "zsh":
        print("autoload -U +X compinit bashcompinit && compinit && bashcompinit")
    cases = "\n".join(f'    {name}) found="{found}" ;;' for name, found in words.items())
    print(_BASH.format(commands=commands, cases=cases))


def _words(name: str) -> dict[str, None]:
    parsers = filter(None, (None if name == "run" else command_parser(name), script_parser_of(name)))
    found = []
    for action in (action for parser in parsers for action in parser._actions):
        found += [option for option in action.option_strings if option.startswith("--")]
        if not action.option_strings:
            found += action.choices or ()
            found += shipped_recipes() if "RECIPE" in str(action.metavar) or action.dest == "name" else ()
    return dict.fromkeys(found)
