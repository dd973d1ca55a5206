"""What makes rollouts, and what wraps what makes them."""
