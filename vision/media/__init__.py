"""Images and videos of datasets: decoding them, finding them in rows, corrupting and writing them."""
