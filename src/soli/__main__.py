"""`python -m soli` is `soli`."""

from soli.cli.main import main

if __name__ == "__main__":
    main()
