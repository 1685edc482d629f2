"""`python -m sparsebit` is the `sparsebit` command."""

if __name__ == "__main__":
    import sys

    from sparsebit.cli import main

    sys.exit(main())
