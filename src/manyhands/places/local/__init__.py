"""Starts the roles of a run on this host, monitors them, and leaves no process behind.

`local.LocalCluster` launches a fixed set of roles that succeed or fail together, `supervisor.Supervisor` members
that come and go; both use `children`. `role_process` is what each child runs; launcher and child communicate over a
`control` channel and a shared `status` table. This file imports nothing, so that a child starts before torch does.
"""
