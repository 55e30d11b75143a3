"""The openfold family draws on everything that was recorded."""

import pytest

from pipeline.cells import Cell
from pipeline.config import ExperimentConfig
from pipeline.openfold import capture
from pipeline.plan import plan


def planned(seeds: int) -> list[Cell]:
    section = {"implementations": ["eager"], "crops": [32], "head_dims": [16, 32], "slices": 2, "families": ["openfold"], "cases": seeds}
    return plan(ExperimentConfig.model_validate({"name": "t", "accuracy": section}))


@pytest.mark.parametrize("head_dim", [16, 32])
def test_every_recorded_site_occurs(head_dim: int) -> None:
    """A plan of many cases uses each recorded site, with and without padded tokens."""
    cells = [cell for cell in planned(40) if cell.head_dim == head_dim]
    padded = [True if cell.masked else None for cell in cells]  # as pipeline.inputs asks for them
    used = {
        capture.load(cell.n, cell.slices, cell.heads, head_dim, cell.seed, only)["site"] for cell, only in zip(cells, padded, strict=True)
    }
    assert used == {site.name for site in capture.sites() if site.head_dim == head_dim}
