"""Models that read pictures, clips and words, and answer with tokens."""
