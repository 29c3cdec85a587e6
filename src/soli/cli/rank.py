"""One rank of a verb: python -m soli.cli.rank VERB JSON, the verb's module and the arguments of its `of_rank`."""

import json
import sys
from importlib import import_module

from soli.mesh.launch.rank import prepare


def main() -> None:
    """Run it; an error, even of its imports, reaches the launcher."""
    prepare()
    import_module(f"soli.cli.{sys.argv[1]}").of_rank(**json.loads(sys.argv[2]))


if __name__ == "__main__":
    main()
