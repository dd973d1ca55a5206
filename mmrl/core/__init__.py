"""Types and protocols that every part shares; needs only torch."""
