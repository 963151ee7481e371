"""All-reduce: schedules as data, their proof, cost, picture and execution; buckets; shared memory."""
