"""``fastmaxsim check``: whether an index, a corpus or a static model is as it was written."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pylate_fastmaxsim.cli.commands import app, end_with


@app.command()
def check(
    folder: Annotated[Path, typer.Argument(help="What to check, with the folders in it.", show_default=False)],
    repair: Annotated[
        bool,
        typer.Option(
            "--repair",
            help="Cut damaged documents off, with all that come after them. The command that wrote them goes on from there.",
        ),
    ] = False,
) -> None:
    """Compare an index, token embeddings or a static model with its checksums. Ends with code 1 if something is damaged."""
    from pylate_fastmaxsim.retrieval.soundness import check_folder

    try:
        found = check_folder(folder, repair=repair)
    except (ValueError, OSError) as error:
        end_with(f"fastmaxsim: {error}")
    for each in found:
        documents = "" if each.documents is None else f" of {each.documents:,} documents"
        state = "all is well" if each.damage is None else "repaired" if each.repaired else "damaged"
        typer.echo(f"{each.folder}: {each.what}{documents}; {state}{f': {each.damage}' if each.damage else ''}")
    if any(each.damage and not each.repaired for each in found):
        raise typer.Exit(1)
