"""The experiments of triangle attention, from a configuration to tables.

configuration (:mod:`pipeline.config`) → cells (:mod:`pipeline.cells`, :mod:`pipeline.plan`) → jobs
(:mod:`pipeline.launch`) → records (:mod:`pipeline.records`) → tables (:mod:`pipeline.tables`).
"""

import importlib.util
import sys
from pathlib import Path

#: The checkout this package lies in.
REPOSITORY = Path(__file__).resolve().parents[1]

# A checkout works without installing anything: the kernels' package lies beside this one.
if importlib.util.find_spec("turbopair") is None and (REPOSITORY / "kernels" / "turbopair").is_dir():
    sys.path.append(str(REPOSITORY / "kernels"))
