"""Data: which samples make batch k, how a batch is assembled, and readers for files a user gives."""
