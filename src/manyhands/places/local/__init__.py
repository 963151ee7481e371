"""Starting the roles of a run on this host, watching them, and leaving nothing behind.

`local.LocalCluster` launches a fixed set of roles that succeed or fail together, `supervisor.Supervisor` members that
come and go; both do it with `children`. `role_process` is what each child runs; launcher and child meet on a
`control` channel and a shared `status_table`. This file imports nothing, so that a child starts before torch does.
"""
