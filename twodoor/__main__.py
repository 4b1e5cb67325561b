"""`python -m twodoor` is the `twodoor` command."""

from twodoor.cli import main

main()
