"""The Responses API: items in, items out, and events with names and numbers."""
