"""`python -m cli` is `mimo`."""

from cli.app import main

if __name__ == "__main__":
    main()
