"""The command `fed-rlhf`, called inside the test process."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from click.testing import Result


def fed_rlhf(
    *arguments: str, answer: str | bytes | None = None, variables: dict[str, str] | None = None
) -> Result:
    """Exit status and output of a command.

    Args:
        arguments: of the command line.
        answer: what the user types.
        variables: added to the environment.
    """
    from typer.testing import CliRunner

    from flows.cli import app

    return CliRunner().invoke(app, list(arguments), input=answer, env=variables)


def refusal(*arguments: str, answer: str | bytes | None = None) -> str:
    """The error of a command that refuses its arguments: one line, no stack trace, exit status 2.

    A line before it may say what was being done, as "checking debug ...".
    """
    result = fed_rlhf(*arguments, answer=answer)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    *doing, error = result.stderr.splitlines(keepends=True)
    assert [line[-5:] for line in doing] in ([], [" ...\n"]), result.stderr
    assert error.startswith("error: ")
    return error
