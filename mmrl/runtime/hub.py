"""Uploads a finished model folder to the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

from mmrl.config.schema import Config, ConfigError


class HubError(RuntimeError):
    """A model could not be uploaded; it is still on disk."""


def check_hub(config: Config) -> None:
    """Raise `ConfigError` for an upload that cannot work."""
    if config.push_to_hub and config.hub_model_id.count("/") != 1:
        raise ConfigError(
            f"'push_to_hub' wants 'hub_model_id' as owner/name, not '{config.hub_model_id}'; set it, or "
            "push_to_hub=false"
        )


def push(config: Config, folder: Path, step: int) -> str:
    """Upload a model folder and return its address; credentials are those of `hf auth login`."""
    try:
        from huggingface_hub import HfApi
    except ImportError as error:
        raise ImportError("push_to_hub needs huggingface_hub; pip install huggingface_hub") from error
    name = config.hub_model_id
    try:
        api = HfApi()
        api.create_repo(name, private=config.hub_private_repo, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=str(folder), commit_message=f"Step {step}")
    except Exception as error:  # the client raises errors of its own and of its transport
        message = " ".join(str(error).split())[:200]
        raise HubError(
            f"cannot upload '{folder}' to '{name}': {type(error).__name__}: {message}. The model is on disk; "
            f"when the hub can be reached and `hf auth login` was done, run: hf upload {name} {folder}"
        ) from error
    return f"https://huggingface.co/{name}"
