"""All code that knows TRL's argument names; translates them to a configuration of mmrl."""
