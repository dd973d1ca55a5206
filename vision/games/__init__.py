"""Rules of games over images."""
