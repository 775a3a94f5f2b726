"""Sharing runs: `npeff push` and `npeff pull`, to and from a folder, a zip file or the Hugging Face Hub."""

from npeff.share.run import PullConfig, PushConfig, pull, push

__all__ = ["PullConfig", "PushConfig", "pull", "push"]
