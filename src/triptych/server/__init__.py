"""The server: OpenAI's and Anthropic's APIs over a session."""
