"""Building preference pairs from generated answers."""
