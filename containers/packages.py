"""Lists what pip installed into the image: name, version, file and SHA-256, from pip's own reports. Standard library only.

    python packages.py TARGET REPORT...

Addresses are left out: they would tell where the image was built, not what is in it.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit


def package(item: dict[str, Any]) -> dict[str, str]:
    """One line of the list. A file of a local folder has no hash in the report; it is computed."""
    path = unquote(urlsplit(item["download_info"]["url"]).path)
    digest = item["download_info"].get("archive_info", {}).get("hashes", {}).get("sha256")
    if digest is None:
        digest = hashlib.sha256(Path(path).read_bytes()).hexdigest()
    about = item["metadata"]
    return {"name": about["name"], "version": about["version"], "file": Path(path).name, "sha256": digest}


def main() -> None:
    """Entry point."""
    target, *reports = sys.argv[1:]
    found = [package(item) for report in reports for item in json.loads(Path(report).read_text(encoding="utf-8"))["install"]]
    found.sort(key=lambda one: one["name"].lower())
    Path(target).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
