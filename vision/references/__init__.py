"""Reference policies of vision-language models: teachers in this process and on servers."""
