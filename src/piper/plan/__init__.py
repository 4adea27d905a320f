"""Plans as data: the model, its files, its text."""
