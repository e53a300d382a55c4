"""Lets `python -m mopdctl` do what the `mopdctl` command does."""

from mopdctl.cli.app import main

if __name__ == "__main__":
    main()
