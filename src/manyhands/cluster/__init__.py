"""Starting the roles of a run on this host, watching them, and leaving nothing behind.

`local.LocalCluster` is the launcher; `role` is what each child runs; they meet on a `control` channel and a
shared `board`. This file imports nothing, so that a child starts before torch does.
"""
