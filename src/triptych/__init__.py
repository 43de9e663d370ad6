"""Triptych makes multimodal models cheap to serve: plan, compress, compile, serve, roll out."""
