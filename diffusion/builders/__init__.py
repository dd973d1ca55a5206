"""What `mmrl build` makes: captioned pictures, and small models to try things on."""
