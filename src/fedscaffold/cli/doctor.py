"""The bare `fedscaffold` command, `--version`, and `doctor`."""

from __future__ import annotations

from typing import Annotated

import typer

import fedscaffold
from fedscaffold.cli.verbs import Json, app, print_answer

__all__ = ["doctor", "welcome"]

NEXT = {
    "demo": ("demo", "compare four algorithms on digits; a page to look at"),
    "theatre": ("theatre", "see clients drift, and how not to"),
    "run": ("run CONFIG.toml", "run one configuration; docs/command-line.md has one"),
    "compare": ("compare --help", "several algorithms, over seeds"),
    "plan": ("plan --help", "what theory says: step size, local steps, rounds"),
    "deploy": ("deploy new DIR", "a federation over a network, from one file"),
    "doctor": ("doctor", "check this installation"),
}


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"fedscaffold {fedscaffold.__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def welcome(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Say what this is and what to type next."""
    if context.invoked_subcommand is None:
        verbs = getattr(context.command, "commands", {})
        typed = [line for verb, line in NEXT.items() if verb in verbs]
        typer.echo(f"fedscaffold {fedscaffold.__version__}: {app.info.help}\n\nWhat to type next:")
        typer.echo("\n".join(f"  fedscaffold {words:<17}{purpose}" for words, purpose in typed))
        typer.echo("\nAll verbs: fedscaffold --help. One of them, with an example: fedscaffold VERB --help")


@app.command(epilog="Example: fedscaffold doctor --json")
def doctor(as_json: Json = False) -> int:
    """Check this installation: extras, versions, devices, data, cache, ports. Exit code 1 if it is not usable."""
    from fedscaffold.experiments.doctor import examine, usable

    findings = examine()
    good = usable(findings)
    lines = [f"{finding.state:<8} {finding.what}: {finding.said}" for finding in findings]
    for j, finding in reversed(list(enumerate(findings))):
        lines[j + 1 : j + 1] = [f"{'':<8}   {finding.mend}"] if finding.mend else []
    print_answer(
        {"usable": good, "findings": [finding._asdict() for finding in findings]},
        [*lines, "", "usable" if good else "not usable: mend what is needed and missing"],
        as_json,
    )
    return 0 if good else 1
