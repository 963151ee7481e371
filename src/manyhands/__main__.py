"""`python -m manyhands`."""

from manyhands.cli.main import main

main()
