"""One rank of `soli train`; the settings come as JSON in its argument."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from soli.train.loop import main

if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    for key in ("config_path", "resume"):
        given[key] = Path(given[key]) if given[key] else None
    main(given.pop("config_path"), **given)
