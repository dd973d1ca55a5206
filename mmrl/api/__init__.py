"""Classes for Python programs, with the interface of TRL and transformers."""
