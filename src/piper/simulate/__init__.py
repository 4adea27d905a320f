"""What a plan would do, without running it."""
