"""Python in another process, for what would kill or confuse this one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run_python(code: str, *arguments: object, fails: bool = False) -> str:
    """Run code and return what it printed, or its traceback if it must fail; a signal fails the test."""
    command = [sys.executable, "-W", "ignore", "-c", code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False, timeout=240)
    assert done.returncode == (1 if fails else 0), f"{done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stderr if fails else done.stdout
