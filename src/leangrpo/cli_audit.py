"""Commands about other people's trainers: `leangrpo audit ...`."""

from __future__ import annotations

import typer

audit_app = typer.Typer(
    no_args_is_help=True, help="Find redundant recomputation in a trainer that is not this one."
)


@audit_app.callback()
def _audit() -> None:
    """Find redundant recomputation in a trainer that is not this one."""
