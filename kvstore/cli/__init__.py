"""The `kvstore` command."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line; says what to install when the `cli` extra is missing."""
    try:
        from kvstore.cli.app import build_app
    except ModuleNotFoundError as error:
        from kvstore.cli.extras import missing_extra

        if (line := missing_extra(error)) is None:
            raise
        print(f"kvstore: {line}", file=sys.stderr)
        sys.exit(2)
    build_app()()
