"""The Messages API, as Anthropic has it: blocks in, blocks out, and events with names."""
