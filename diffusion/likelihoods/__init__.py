"""What a step of a flow model is, and how likely."""
