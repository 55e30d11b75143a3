"""``python -m pipeline``."""

import sys

try:
    from pipeline.cli import main
except ModuleNotFoundError as error:
    if error.name is None or error.name.partition(".")[0] in ("pipeline", "turbopair"):
        raise
    print(
        f"error: this Python ({sys.executable}) lacks the module {error.name!r}; "
        "use `.venv/bin/python -m pipeline`, whose environment `make run` makes",
        file=sys.stderr,
    )
    sys.exit(2)

if __name__ == "__main__":
    main()
