"""The `keepk` command."""

import sys


def main() -> None:
    """Run the command, or say which packages it needs."""
    try:
        from keepk.cli.commands import app  # noqa: PLC0415 - needs the extra keepk[cli], which may be missing
    except ModuleNotFoundError as missing:
        if (missing.name or "").partition(".")[0] not in ("typer", "rich"):
            raise
        print(f'keepk: {missing.name} is not installed. Run: pip install "keepk[cli]"', file=sys.stderr)
        raise SystemExit(1) from None
    app(prog_name="keepk")
