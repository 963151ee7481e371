"""Starts the roles of a run on this host, monitors them, and leaves no process behind.

`supervisor` has a fixed set of roles that succeed or fail together, and members that come and go. `role_process` is
what each child runs; launcher and child communicate over a `control` channel and a shared `status` table.
"""
