"""`python -m keyhole` is the command `keyhole`. Its imports take half a second, in which Ctrl-C is no error either."""

import sys


def main() -> int:
    """Runs one command and returns its exit code."""
    try:
        from keyhole.cli import main as run
    except KeyboardInterrupt:
        print("keyhole: interrupted", file=sys.stderr)
        return 130
    return run()


if __name__ == "__main__":
    sys.exit(main())
