"""The `keepk` command."""

import sys


def main() -> None:
    """Run the command. Exits with status 1 and a one-line message if the extra ``keepk[cli]`` is not installed."""
    try:
        from keepk.cli.commands import app  # noqa: PLC0415 - needs the extra keepk[cli], which may be missing
    except ModuleNotFoundError as missing:
        # A module that the user's own model fails to import must not be reported as a missing extra.
        if (missing.name or "").partition(".")[0] not in ("typer", "rich"):
            raise
        print(f'keepk: {missing.name} is not installed. Run: pip install "keepk[cli]"', file=sys.stderr)
        raise SystemExit(1) from None
    app(prog_name="keepk")
