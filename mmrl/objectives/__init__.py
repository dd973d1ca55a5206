"""What is minimised: two objectives, and the places in which methods differ."""
