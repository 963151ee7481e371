"""Our speed beside that of what people would use instead, measured in one run."""
