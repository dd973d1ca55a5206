"""The classes that Python programs use, in the habit of TRL and transformers."""
