"""Sharing runs: `npeff push` and `npeff pull`, to and from a folder, a zip file or the Hugging Face Hub."""
