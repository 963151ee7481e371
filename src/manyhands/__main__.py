"""`python -m manyhands`."""

from manyhands.cli.process import program

program()
