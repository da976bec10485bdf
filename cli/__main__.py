"""Run the ``hdtool`` command by ``python -m hdtool.cli``."""

from hdtool.cli.app import main

if __name__ == "__main__":
    main()
