"""The command line for processes of a fleet, which start no workers: no template waits beside each of them."""

from manyhands.cli.program import program

if __name__ == "__main__":
    program()
