"""Whether wandb can record as asked, before anything starts. Nothing heavy is imported, wandb only where it decides."""

import os

from research.errors import ConfigError, SettingError

_MODES = ("online", "offline", "disabled", "shared", "dryrun", "run")  # that wandb itself takes from WANDB_MODE
_NO = ("", "0", "false", "no")


def resolve(mode: str) -> str:
    """The mode of `config.wandb.mode`; WANDB_DISABLED decides where that is `auto`."""
    disabled = os.environ.get("WANDB_DISABLED", "").lower() not in _NO
    return "disabled" if mode == "auto" and disabled else mode


def check(mode: str) -> None:
    """Checks `config.wandb.mode` and what the environment says of it. Credentials are looked up, not tried.

    Raises:
      ConfigError: WANDB_MODE is none of wandb's, or records are to be sent and nobody is logged in.
    """
    if resolve(mode) == "disabled":
        return
    asked = os.environ.get("WANDB_MODE", "")
    if asked and asked not in _MODES:
        raise ConfigError(f"WANDB_MODE={asked}: must be one of {', '.join(_MODES)}")
    if mode == "online" or (mode == "auto" and asked == "online"):
        import wandb

        if not wandb.login(prompt=False, verify=False):
            words = "auto, offline or disabled while not logged in; `wandb login` or WANDB_API_KEY log in"
            raise (
                SettingError("wandb.mode", mode, words)
                if mode == "online"
                else ConfigError(f"WANDB_MODE=online: must be {words.removeprefix('auto, ')}")
            )
