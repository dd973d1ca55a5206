"""All code that depends on TRL's names: their translation to a configuration of mmrl."""
