"""Families of vision-language models: `FAMILIES` of each file maps `model_type` to family rules."""
