"""`python -m pipeline` where a module is missing."""

from __future__ import annotations

import os
import subprocess
import sys

from pipeline import REPOSITORY


def start(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": f"{REPOSITORY}"}
    return subprocess.run([sys.executable, *arguments], cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)


def test_a_python_without_the_dependencies_is_told_which_one_has_them() -> None:
    done = start("-S", "-m", "pipeline", "doctor")  # -S: without the packages that are installed
    assert done.returncode == 2 and not done.stdout
    (line,) = done.stderr.splitlines()
    assert "lacks the module 'typer'; use `.venv/bin/python -m pipeline`" in line and "make run" in line


def test_a_missing_module_of_the_repository_keeps_its_traceback() -> None:
    code = "import runpy, sys; sys.modules['pipeline.cells'] = None; runpy.run_module('pipeline', run_name='__main__')"
    done = start("-c", code)
    assert done.returncode == 1 and "Traceback" in done.stderr and "pipeline.cells" in done.stderr.splitlines()[-1]
