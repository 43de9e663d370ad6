"""Whisper-base and recorded speech, from packages that carry them, for benches of audio."""
