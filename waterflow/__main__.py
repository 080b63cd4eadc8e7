"""`python -m waterflow` is the command `waterflow`."""

from waterflow.cli.main import main

if __name__ == "__main__":
    main()
