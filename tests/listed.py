"""Checks that a CycloneDX list names every dependency that pyproject.toml declares: `make build` runs it."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from lowest import lowest

components = json.loads(Path(sys.argv[1]).read_text())["components"]
listed = {re.sub(r"[-_.]+", "-", one["name"]).lower() for one in components}
missing = {name for name in lowest() if name != "pytest"} - listed
if missing:
    sys.exit(f"{sys.argv[1]} does not list {', '.join(sorted(missing))}")
print(f"{sys.argv[1]} lists {len(listed)} components")
