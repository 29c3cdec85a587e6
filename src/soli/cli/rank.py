"""One rank of a verb: python -m soli.cli.rank VERB JSON, the verb's module and the arguments of its `of_rank`."""

import json
import os
import sys
from importlib import import_module

from soli.core.errors import SoliError
from soli.mesh.launch.rank import prepare


def main() -> None:
    """Run it; an error, even of its imports, reaches the launcher."""
    prepare()
    given = json.loads(sys.argv[2])
    try:
        import_module(f"soli.cli.{sys.argv[1]}").of_rank(**given)
    except SoliError as error:
        if given.get("as_json") and os.environ["RANK"] == "0":
            print(json.dumps({"error": error.to_json()}, indent=1))
        raise


if __name__ == "__main__":
    main()
