"""Vision-language models: images, videos and text in, tokens out."""
