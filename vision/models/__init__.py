"""Loading vision-language models and preparing their inputs."""
