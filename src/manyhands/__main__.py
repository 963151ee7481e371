"""`python -m manyhands`."""

from manyhands.cli.program import program

program()
