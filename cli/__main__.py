"""Run the ``hdtool`` command as ``python -m hdtool.cli``."""

from hdtool.cli.app import main

if __name__ == "__main__":
    main()
