"""One rank of `soli train`: python -m soli.cli.train_rank JSON, the arguments of train.loop.main."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from soli.cli.train import PATHS
from soli.mesh.launch.rank import prepare


def main() -> None:
    """Run the loop; an error, even of its imports, reaches the launcher."""
    prepare()
    from soli.train import loop

    given = json.loads(sys.argv[1])
    for key in PATHS:
        given[key] = Path(given[key]) if given[key] else None
    loop.main(given.pop("config_path"), **given)


if __name__ == "__main__":
    main()
