"""Python interface of mmrl, modelled on the trainers of TRL and transformers."""
