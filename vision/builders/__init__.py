"""What `mmrl build` makes: data sets, and small models to try things on."""
