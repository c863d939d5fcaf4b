"""The commands `fed-rlhf owner`: what an owner of data sees of its own side."""

from __future__ import annotations

import logging
import os
import pwd
from pathlib import Path
from typing import Annotated

import typer

owner = typer.Typer(
    name="owner",
    no_args_is_help=True,
    help="Take part with data of your own, and see what has left you.",
)
HomeArgument = Annotated[
    Path,
    typer.Argument(
        metavar="HOME",
        help="Folder of the owner, such as owners/NAME of a run.",
        file_okay=False,
        exists=True,
    ),
]


SocketsOption = Annotated[
    Path | None,
    typer.Option(help="Folder of the owners' sockets; default: sockets/ of the project's home."),
]


@owner.command()
def init(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help="What the server, Prefect and MLflow call the owner: choose a pseudonym."
        ),
    ],
    data: Annotated[
        Path, typer.Option(help="File or folder of its pairs (.jsonl, .parquet or .csv).", exists=True)
    ],
    home: Annotated[
        Path | None, typer.Option(help="Folder of the owner, new; default: NAME.", show_default=False)
    ] = None,
    sockets: SocketsOption = None,
    server: Annotated[
        str | None,
        typer.Option(
            metavar="USER",
            help="User whose processes are answered; default: the one who runs this command.",
            show_default=False,
        ),
    ] = None,
    column: Annotated[
        list[str] | None,
        typer.Option(help="Name of a column in the file, as prompt=question.", show_default=False),
    ] = None,
) -> None:
    """Make the home of an owner, with owner.yaml; nothing is copied or sent."""
    from components.config import DataConfig, UserError
    from components.data.sources import check_columns
    from components.data.sources.owners import file_source
    from components.owners.home import CONFIG, OwnerConfig, create_home, sockets_root
    from components.owners.publish import own_data
    from flows.process import exit_status

    def call() -> None:
        columns = dict(item.partition("=")[::2] for item in column or [])
        if not all(columns.values()):
            raise UserError("--column: expected NAME=COLUMN, such as prompt=question")
        file_source(data)
        try:
            user = os.getuid() if server is None else pwd.getpwnam(server).pw_uid
        except KeyError:
            raise UserError(f"--server: there is no user {server!r} on this machine") from None
        folder = home or Path(name)
        root = sockets_root(None if sockets is None else str(sockets)).absolute()
        config = OwnerConfig(
            name=name, data=str(data.absolute()), columns=columns, sockets=str(root), server=user
        )
        check_columns(own_data(folder, config, DataConfig()))
        create_home(folder, config)
        print(f"{folder / CONFIG} is written; next: fed-rlhf owner check {folder} RECIPE")

    raise typer.Exit(exit_status(call))


@owner.command()
def check(
    home: HomeArgument,
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="Name or path of the server's recipe.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings on top of it.")
    ] = None,
) -> None:
    """Prepare the owner's pairs for a recipe; print what it would publish, prompts of the server included."""
    from components.owners.publish import check_owner
    from components.recipes import load_recipe
    from flows.process import FAILED, exit_status

    def call() -> int:
        statement = check_owner(home, load_recipe(recipe, overrides or []))
        print(statement.model_dump_json(indent=2))
        return FAILED if statement.unmet else 0

    raise typer.Exit(exit_status(call))


@owner.command()
def start(home: HomeArgument) -> None:
    """Answer the server's requests until Ctrl-C."""
    from components.environment import configure_libraries
    from components.owners.start import start as serve
    from flows.process import exit_status

    configure_libraries()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    raise typer.Exit(exit_status(lambda: serve(home)))


@owner.command()
def log(
    home: HomeArgument,
    last: Annotated[bool, typer.Option("--last", help="Print the last message only.")] = False,
    tensors: Annotated[bool, typer.Option("--tensors", help="Print each tensor that was sent.")] = False,
) -> None:
    """Print each message that left the owner: bytes, hashes, tensors with their norms, figures."""
    from components.owners.sent_log import describe, read_log
    from flows.process import exit_status

    def call() -> None:
        messages = list(read_log(home))
        for message in messages[-1:] if last else messages:
            print("\n".join(describe(message, tensors)))

    raise typer.Exit(exit_status(call))


@owner.command()
def replay(
    home: HomeArgument,
    job: Annotated[
        str | None,
        typer.Argument(metavar="[JOB]", help="Key of the job, see `owner log`.", show_default=False),
    ] = None,
    device: Annotated[str, typer.Option(help="Device on which the owner works.")] = "cpu",
) -> None:
    """Carry out a job again, by default the last one, and compare what it gives with what was sent."""
    from components.owners.replay import replay as carry_out
    from flows.process import FAILED, exit_status

    def call() -> int:
        key, differences = carry_out(home, job, device)
        print("\n".join([*differences, f"job {key}: " + ("differs" if differences else "the same bytes")]))
        return FAILED if differences else 0

    raise typer.Exit(exit_status(call))
