"""What differs between pipelines of diffusers: one file each."""
