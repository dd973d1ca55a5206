"""Model families of diffusers pipelines, one file each."""
