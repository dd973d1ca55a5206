"""Images and videos of data sets: decoding, columns that name them, writing them."""
