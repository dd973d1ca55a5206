"""Everything that knows TRL's names: what each becomes in a configuration of mmrl."""
