"""What an engine that generates text spends while it answers."""
