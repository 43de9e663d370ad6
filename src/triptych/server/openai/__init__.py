"""OpenAI's API over a session: chat and text completions, streamed or whole."""
