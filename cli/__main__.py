"""Run the ``hdtool`` command as ``python -m hdtool.cli``."""

from hdtool.data.isolated_processes import leave_current_folder

if __name__ == "__main__":
    leave_current_folder()  # before the imports of libraries

    from hdtool.cli.app import main

    main()
