"""The small cell that the tests of this folder start from."""

import torch

from pipeline.cells import Cell

CPU = torch.device("cpu")


def make_cell(experiment: str = "accuracy", implementation: str = "eager", **fields: object) -> Cell:
    """A small cell; fields override."""
    small = {"n": 40, "slices": 12, "heads": 2, "head_dim": 16, "family": "normal", "seed": 3}
    return Cell(experiment=experiment, implementation=implementation, **{**small, **fields})
