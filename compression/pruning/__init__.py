"""Forward pass of vision-language models with pruned visual computation."""
