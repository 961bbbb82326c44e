"""Entry point of `python -m brimful`."""

from brimful.cli.app import main

if __name__ == "__main__":
    main()
