"""``python -m hdtool.cli`` is the ``hdtool`` command."""

from hdtool.cli.app import main

if __name__ == "__main__":
    main()
