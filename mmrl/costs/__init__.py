"""What an engine spends while it answers."""
