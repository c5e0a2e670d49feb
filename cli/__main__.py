"""`mimo`, and `python -m cli`. Ctrl-C is heard before anything is loaded, and until all has ended."""

from cli.interrupts import leave_at_once


def main() -> None:
    leave_at_once()
    try:
        from cli.app import main as run

        run()
    finally:
        leave_at_once()


if __name__ == "__main__":
    main()
