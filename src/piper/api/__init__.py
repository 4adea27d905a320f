"""What users call: compile, train, check."""
