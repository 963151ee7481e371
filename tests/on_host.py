"""on_host.py NAMESPACE SCRIPT WORDS: run a script of Python in a network namespace, as `ip netns exec` would.

For processes that are forked warm, which cannot begin with another program; see `hosts.Hosts.script`.
"""

import runpy
import sys

from hosts import enter

if __name__ == "__main__":
    enter(sys.argv[1])  # before there is another thread: each has a namespace of its own
    sys.argv[:] = sys.argv[2:]
    runpy.run_path(sys.argv[0], run_name="__main__")
