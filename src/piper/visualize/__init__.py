"""Pictures of plans and timelines: text, trace files, HTML."""
