"""What caches hold of keys and values: blocks of them, in which slots they stand, and who reads them."""
