import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import synthetic

from pipeline.tables import write_all


@pytest.fixture(scope="session")
def run():
    """Records of a made-up run with most kinds of endings."""
    return synthetic.whole_run()


@pytest.fixture(scope="session")
def written(run, tmp_path_factory):
    """(folder, files) of that run's tables, figures, claims and report."""
    out = tmp_path_factory.mktemp("written")
    return out, write_all(run, None, out)
