"""The parameter server: pure cores, the store of a shard, and the live roles around them."""
