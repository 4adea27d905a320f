"""Pictures of plans and timelines: text, pages, static pictures, trace files."""
