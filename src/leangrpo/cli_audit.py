"""Commands about other people's trainers: `leangrpo audit ...`."""

from __future__ import annotations

from typing import Annotated

import typer

from .cli_options import JsonFile, check_writable
from .errors import LeanError, problem

audit_app = typer.Typer(
    no_args_is_help=True, help="Find redundant recomputation in a trainer that is not this one."
)


@audit_app.callback()
def _audit() -> None:
    """Find redundant recomputation in a trainer that is not this one."""


@audit_app.command(
    # What follows the program's name is the program's, options too.
    context_settings={"allow_interspersed_args": False},
)
def run(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SCRIPT|MODULE [ARGS]...",
            help="The program and its arguments.",
            show_default=False,
        ),
    ] = None,
    is_module: Annotated[
        bool, typer.Option("-m", help="SCRIPT is a module, as for python -m.")
    ] = False,
    network: Annotated[
        str | None,
        typer.Option(
            "--module",
            metavar="NAME_OR_CLASS",
            help="The denoiser, by its class or by the variable or attribute it is called by. "
            "Default: what takes a time and is trained.",
        ),
    ] = None,
    fail_above: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE",
            help="End with 3 when redundant evaluations take more than this share of the time, "
            "such as 0.05.",
        ),
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Run a training program unchanged, and report what its updates compute again.

    Options go before SCRIPT; what follows it is the program's. The report goes to standard error.
    The exit code is the program's own; of one that ends well 3 with --fail-above.

    Examples: leangrpo audit run train.py --config sd3.yaml;
    leangrpo audit run --json audit.json --fail-above 0.05 -m my_package.train --steps 20;
    torchrun --nproc-per-node 8 -m leangrpo audit run train.py
    """
    arguments = list(words or [])
    if not arguments:
        raise LeanError("`leangrpo audit run` needs a program: SCRIPT [ARGS], or -m MODULE [ARGS].")
    if fail_above is not None and not 0 <= fail_above < 1:
        raise problem("--fail-above", fail_above, "it must be at least 0 and below 1")
    check_writable(json_file)
    script = arguments.pop(0)
    from .audit_run import check_script, run_audited

    check_script(script, is_module)
    code = run_audited(
        script,
        arguments,
        is_module=is_module,
        name=network,
        json_file=json_file,
        fail_above=fail_above,
    )
    raise typer.Exit(code)
