"""What differs between families of vision-language models, one small file each."""
