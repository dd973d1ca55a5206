"""Pictures of what a model saw and said, for the HTML report."""
