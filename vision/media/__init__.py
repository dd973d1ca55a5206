"""Images and videos of datasets: finding them in rows, decoding, corrupting and writing them."""
