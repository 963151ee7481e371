"""A run's page for browsers: the server, who may read it, and how many connections it keeps."""
