"""The parameter server: the pure state machines, the store of a shard, and the live processes that drive them."""
