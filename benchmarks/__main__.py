"""`python -m benchmarks`: measure the running stack from outside and write the report."""

if __name__ == "__main__":
    # Imported here and not above: worker processes import this module again, and have no use for the rest.
    import sys

    from benchmarks.run import main

    sys.exit(main())
