"""`python -m benchmarks.peers`: measure other servers and Twodoor on the same model, one after another."""

if __name__ == "__main__":
    # Imported here and not above: worker processes import this module again, and have no use for the rest.
    import sys

    from benchmarks.peers.run import main

    sys.exit(main())
